"""What a cell computes: random prompts of equal length, each row with an adapter in its turn."""

from __future__ import annotations

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.bench.grid import Settings
from lite_runner.bench.random_adapters import random_adapters
from lite_runner.config.generation import GenerationConfig
from lite_runner.model.adapters import AdapterJob
from lite_runner.plan.job import Job


def workload(model: Decoder, settings: Settings) -> Job:
    """The same prompts and adapters each time."""
    shape = (settings.batch, settings.prompt)
    prompts = np.random.default_rng(0).integers(model.vocab_size, size=shape, dtype=np.int32)
    if model.prefix is not None:  # with less the scheduler takes none
        prompts[:, -2:] = model.prefix.mask_token_ids[0], model.prefix.end_token_id
    adapters = None
    if settings.adapters:
        opened = random_adapters(model, settings.adapters)
        names = [opened[row % settings.adapters].name for row in range(settings.batch)]
        adapters = AdapterJob(opened, names)
    return Job(
        requests=(),
        tokens=prompts.tolist(),
        generation=GenerationConfig(max_new_tokens=settings.new),
        slots=settings.batch,
        length=settings.length,
        adapters=adapters,
    )
