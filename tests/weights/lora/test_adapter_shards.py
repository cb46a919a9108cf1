"""Adapters sharded for several ranks: the sum of the shards, and their reuse."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.adapter_reader import open_adapters, shards_of
from lite_runner.weights.lora.adapter_shards import cached_shards, open_shards
from tests.mutations import mutated
from tests.paths import FIXTURES


def opened(family: str) -> tuple[Decoder, list[Adapter]]:
    model = model_config_of(FIXTURES / "reference" / family)
    assert model is not None
    return model, list(open_adapters(FIXTURES / "adapters" / family, model).values())


def product(pair: LoraPair) -> NDArray[np.float64]:
    return pair.scale * (pair.b.float32().astype(np.float64) @ pair.a.float32())


@pytest.mark.parametrize("vocab_parallel", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "bloom", "gpt2"])
def test_the_pieces_make_the_whole(tmp_path: Path, family: str, vocab_parallel: bool) -> None:
    model, adapters = opened(family)
    cut = [
        cached_shards(adapters, model, Ranks(rank, 1, 2), tmp_path, vocab_parallel=vocab_parallel)
        for rank in (0, 1)
    ]
    shapes = set()
    for number, whole in enumerate(adapters):
        halves = [pieces[number] for pieces in cut]
        for name, pair in whole.pairs.items():
            first, second = (half.pairs[name] for half in halves)
            if first.b.shape != pair.b.shape:
                joined = np.concatenate([product(first), product(second)], axis=0)
            elif first.a.shape != pair.a.shape:
                joined = np.concatenate([product(first), product(second)], axis=1)
            else:
                joined = product(first)
                assert not vocab_parallel or "embedding" in name
            assert np.array_equal(joined, product(pair)), name
            shapes.add((first.a.shape != pair.a.shape, first.b.shape != pair.b.shape))
    assert {(True, False), (False, True)} <= shapes


def test_cut_adapters_are_reused_until_something_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, adapters = opened("llama")
    ranks, file = Ranks(1, 1, 2), tmp_path / "rank_1" / "all.safetensors"

    def cut(some: list[Adapter]) -> int:
        cached_shards(some, model, ranks, tmp_path, vocab_parallel=True)
        return file.stat().st_mtime_ns

    first = cut(adapters[:1])
    assert shards_of(tmp_path) == tmp_path and shards_of(tmp_path / "rank_1") is None
    (tmp_path / "lora_adapter.json").write_text('{"rank_1": "rank_1"}')  # names like any other
    assert shards_of(tmp_path) is None
    assert cut(adapters) == first  # the others are added
    manifest = tmp_path / "rank_1" / "manifest.json"
    assert json.loads(manifest.read_text())["adapters"].keys() == {one.name for one in adapters}
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"all\.safetensors: has changed since"):
        open_shards(tmp_path, model, ranks, ["all"], vocab_parallel=True)
    damaged = file.stat().st_mtime_ns
    assert cut(adapters) != damaged
    assert f"{file} is damaged, and the adapter is sharded again" in capsys.readouterr().err
    open_shards(tmp_path, model, ranks, ["all"], vocab_parallel=True)
    plain = json.loads(manifest.read_text())
    plain["adapters"]["all"]["source"] = "of other weights"
    manifest.write_text(json.dumps(plain))
    before = file.stat().st_mtime_ns
    assert cut(adapters) != before


@pytest.mark.parametrize("name", ["manifest.json", "all.safetensors"])
def test_links_out_of_the_root_are_refused(tmp_path: Path, name: str) -> None:
    model, adapters = opened("llama")
    root, ranks = tmp_path / "root", Ranks(1, 1, 2)
    cached_shards(adapters[:1], model, ranks, root, vocab_parallel=True)
    open_shards(root, model, ranks, ["all"], vocab_parallel=True, root=root)
    link = root / "rank_1" / name
    link.rename(tmp_path / name)
    link.symlink_to(tmp_path / name)
    open_shards(root, model, ranks, ["all"], vocab_parallel=True)
    with pytest.raises(ArtifactError, match=f"{link}: leads to {tmp_path / name}, which lies out"):
        open_shards(root, model, ranks, ["all"], vocab_parallel=True, root=root)


def test_shards_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model, adapters = opened("llama")
    cached_shards(adapters[:1], model, Ranks(0, 1, 2), tmp_path, vocab_parallel=True)

    def fails(match: str, ranks: Ranks, name: str = "all", vocab_parallel: bool = True) -> None:
        with pytest.raises(ArtifactError, match=match):
            open_shards(tmp_path, model, ranks, [name], vocab_parallel=vocab_parallel)

    fails(r"rank_1: no manifest\.json", Ranks(1, 1, 2))
    fails("sharded for other ranks: tp is 2, expected 1", Ranks())
    fails("vocab_parallel is True, expected False", Ranks(0, 1, 2), vocab_parallel=False)
    fails("no adapter 'al'; did you mean all", Ranks(0, 1, 2), "al")
    other, _ = opened("qwen2")
    with pytest.raises(ArtifactError, match="model is another"):
        open_shards(tmp_path, other, Ranks(0, 1, 2), ["all"], vocab_parallel=True)
    manifest = tmp_path / "rank_0" / "manifest.json"
    plain = json.loads(manifest.read_text())
    del plain["checksum"]
    plain["adapters"]["../all"] = plain["adapters"]["all"]
    plain["adapters"]["all"]["scale"]["lm_head.weight"] = 1.0
    manifest.write_text(json.dumps(plain))
    fails("is not as manifest.json says", Ranks(0, 1, 2), "../all")
    fails(r"lm_head\.weight: no pair of A and B that fits", Ranks(0, 1, 2))


def test_mutations_of_a_manifest_are_refused_or_read(tmp_path: Path) -> None:
    model, adapters = opened("llama")
    ranks = Ranks(0, 1, 2)
    cached_shards(adapters[:1], model, ranks, tmp_path, vocab_parallel=True)
    path, generator = tmp_path / "rank_0" / "manifest.json", random.Random(0)
    whole = json.loads(path.read_text())
    for change in ({"tp": 2.0}, {"adapters": {"all": {}}}, {"tensor_index": 1}):
        path.write_text(json.dumps(whole | change))
        with pytest.raises(ArtifactError, match=r"rank_0/manifest\.json: "):
            open_shards(tmp_path, model, ranks, ["all"], vocab_parallel=True)
    del whole["checksum"]
    for _ in range(300):
        path.write_text(json.dumps(mutated(copy.deepcopy(whole), generator)))
        try:
            open_shards(tmp_path, model, ranks, ["all"], vocab_parallel=True)
        except ArtifactError as error:
            assert str(tmp_path) in error.message
