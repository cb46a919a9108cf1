"""The seed of a run that samples: the one that was given, or one that is drawn for it alone."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompt import Request
from lite_runner.config.prompts import MAX_PROMPT_BYTES, prompt_file
from lite_runner.config.schema import Config, RunConfig

SEEDS = 2**32


def with_seed(config: Config) -> Config:
    """`config` with a seed to sample by. One that nobody gave is drawn, and the run written with it
    repeats: random weights stay those that they were."""
    if config.seed is not None or not samples(config):
        return config
    return replace(config, seed=secrets.randbelow(SEEDS), weights_seed=config.checkpoint_seed)


def samples(config: RunConfig) -> bool:
    """Whether the run may draw tokens: all of its prompts, or one that says so itself."""
    if not isinstance(config, GenerateOptions):
        return False
    if config.generation().do_sample:
        return True
    data = config.predict_data
    if isinstance(data, str):
        path = prompt_file(data)
        return path is not None and _speaks_of_it(path)
    return any(isinstance(item, Request) and item.do_sample for item in data)


def _speaks_of_it(path: Path) -> bool:
    """Whether the option is named in a file of prompts, whose records are not read for this."""
    try:
        with path.open("rb") as file:
            return b"do_sample" in file.read(MAX_PROMPT_BYTES)
    except OSError:  # who reads the prompts says so
        return False
