"""The seed of a run that samples: the one that was given, or one that is drawn for it alone."""

from __future__ import annotations

import secrets
from dataclasses import replace

from lite_runner.config.schema import RunConfig

SEEDS = 2**32


def with_seed(config: RunConfig) -> RunConfig:
    """`config` with a seed to sample by. One that nobody gave is drawn, and the run written with it
    repeats: random weights stay those that they were."""
    if config.seed is not None or not samples(config):
        return config
    return replace(config, seed=secrets.randbelow(SEEDS), weights_seed=config.checkpoint_seed)


def samples(config: RunConfig) -> bool:
    """Whether the run draws tokens."""
    return config.predicts and config.generation().do_sample
