"""Loading our own engine, for the benchmarks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lite_runner import progress
from lite_runner.backends import Backend
from lite_runner.config.argv import parse
from lite_runner.config.schema import ComputeOptions
from lite_runner.config.sections import Ranks
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate, tokenizer_of
from lite_runner.plan import Job
from lite_runner.plan.resources import open_backend, resolve_backend, run_options
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment


def opened(
    config: ComputeOptions,
    files: ModelFiles,
    job: Job,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> tuple[Backend, ComputeOptions]:
    """The backend of a job, ready for its steps, and the config that names it."""
    device = environment.resolve_device(config.context.device_target)
    tokenizer = tokenizer_of(config.tokenizer, files)
    for prompt in job.tokens[:1]:  # a run has texts, and the tokenizer is made when it is needed
        tokenizer.encode(tokenizer.decode(prompt))
    options = run_options(config.settings, job, device, ranks, tokenizer)
    options = resolve_backend(files, options)
    backend = open_backend(files, options)
    backend.prepare()
    return backend, replace(config, backend=options.settings.backend)


def load(overrides: Sequence[str], slots: int, length: int) -> Backend:
    """SmolLM2-135M's backend as a run with these settings loads it, ready for `slots` sequences
    of `length` tokens."""
    settings = ["model=smollm2_135m", "predict_data=ids", *overrides]
    config, _ = resolve(parse(settings, heads()))
    progress.configure(verbosity=0)
    files = locate(config.source)
    return opened(config, files, Job([], [], config.generation(files.model), slots, length))[0]
