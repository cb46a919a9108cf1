"""Which shards are verified, and by whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.weights.random import random_checkpoint
from lite_runner.weights.sharding import shard_set
from lite_runner.weights.sharding.reshard import tensors_for, verify_shards
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


def test_what_the_launcher_has_verified_is_not_verified_again(
    folder: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(shard_set, "sha256_of", counted)
    every = [Ranks(rank, 2, 2) for rank in range(4)]  # each shard is read by two
    verify_shards(folder, model, every)
    assert sorted(hashed) == ["checkpoint_0.ckpt", "checkpoint_1.ckpt"]
    tensors_for(folder, model, Ranks(1, 1, 2), verified=True)
    tensors_for(folder, model, Ranks(), auto_trans=True, verified=True)
    assert len(hashed) == 2
    file = folder / "rank_1/checkpoint_1.ckpt"
    content = bytearray(file.read_bytes())
    content[-700] ^= 1
    file.write_bytes(content)
    verify_shards(folder, model, [Ranks(0, 1, 2)])  # which reads another
    for others in (every, [Ranks()]):
        with pytest.raises(ArtifactError, match="another file than the one that was written"):
            verify_shards(folder, model, others)
