from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards


@pytest.fixture
def model(configs: dict[str, Decoder]) -> Decoder:
    return configs["llama"]


@pytest.fixture
def folder(tmp_path: Path, model: Decoder) -> Path:
    """A set of two ranks."""
    cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
    write_shards(
        tmp_path / "set",
        random_checkpoint(model, 0),
        cutting,
        extra={},
        workers=2,
        overwrite=False,
        advance=lambda size: None,
    )
    return tmp_path / "set"
