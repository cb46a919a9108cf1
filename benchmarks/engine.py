"""What the benchmarks of our own engine share: how it is loaded, and how it is stepped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.config.argv import parse
from lite_runner.config.compose import heads, resolve
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Request, Scheduler
from lite_runner.model import model_files
from lite_runner.plan import session
from lite_runner.system import environment


def load(overrides: Sequence[str], slots: int, length: int) -> Backend:
    """SmolLM2-135M's backend as a run with these settings loads it, ready for `slots` sequences
    of `length` tokens."""
    settings = ["model=smollm2_135m", "predict_data=ids", *overrides]
    config, _ = resolve(parse(settings, heads()))
    progress.configure(verbosity=0)
    files = model_files.locate(config)
    device = environment.resolve_device(config.context.device_target)
    job = session.Job([], [], config.generation(files.model), slots, length)
    backend = session.load(config, files, device, job, model_files.tokenizer_of(config, files))
    backend.prepare()
    return backend


def lockstep(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    adapters: Iterable[str | None] | None = None,
) -> Scheduler:
    """A scheduler whose first step reads all prompts, so that this and what follows can be timed
    apart; `new_tokens` steps give each a token, for no end token stops it. `adapters` is one for
    each prompt; none: the base model."""
    info = backend.info
    budget = max(sum(map(len, prompts)), info.slots - 1 + info.chunk)
    scheduler = Scheduler(backend, budget, prefix_cache=False)
    options = GenerationConfig(max_new_tokens=new_tokens)
    for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True):
        scheduler.add(Request(np.array(prompt, np.int32), options, adapter))
    return scheduler
