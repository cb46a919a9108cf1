"""The seed of a run that samples: the one that was given, or one that is drawn for it alone."""

from __future__ import annotations

import secrets
from dataclasses import replace

from lite_runner.config.prompts import prompt_file
from lite_runner.config.request import Item, Request
from lite_runner.config.schema import RunConfig

SEEDS = 2**32


def with_seed(config: RunConfig) -> RunConfig:
    """`config` with a seed to sample by. One that nobody gave is drawn, and the run written with it
    repeats: random weights stay those that they were."""
    if config.seed is not None or not samples(config):
        return config
    return replace(config, seed=secrets.randbelow(SEEDS), weights_seed=config.checkpoint_seed)


def samples(config: RunConfig) -> bool:
    """Whether the run may draw tokens: a file of records is not read for it, and may ask for it."""
    if not config.predicts:
        return False
    path, data = prompt_file(config.predict_data), config.predict_data
    own = path.suffix.lower() != ".txt" if path else any(map(_draws, data))
    return own or config.generation().do_sample


def _draws(item: Item) -> bool:
    return isinstance(item, Request) and bool(item.do_sample)
