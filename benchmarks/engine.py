"""How the benchmarks of our own engine load it."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.config.argv import parse
from lite_runner.model.locate import locate
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.plan import loading
from lite_runner.plan.job import Job
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment


def load(overrides: Sequence[str], slots: int, length: int) -> Backend:
    """SmolLM2-135M's backend as a run with these settings loads it, ready for `slots` sequences
    of `length` tokens."""
    settings = ["model=smollm2_135m", "predict_data=ids", *overrides]
    config, _ = resolve(parse(settings, heads()))
    progress.configure(verbosity=0)
    files = locate(config)
    device = environment.resolve_device(config.context.device_target)
    job = Job([], [], config.generation(files.model), slots, length)
    backend = loading.load(config, files, device, job, tokenizer_of(config, files))
    backend.prepare()
    return backend
