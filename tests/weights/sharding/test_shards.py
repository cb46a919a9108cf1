"""Sharded, merged and resharded, bit for bit; MindSpore's own transform is the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.system.files import sha256_of
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.sharding import shards
from lite_runner.weights.sharding.partition import pieces, strategy_of
from lite_runner.weights.sharding.shard_writer import (
    Cutting,
    ShardFormat,
    write_merged,
    write_shards,
)
from lite_runner.weights.sharding.shards import (
    open_shards,
    tensors_for,
    verify_shards,
    whole_tensors,
)
from lite_runner.weights.sharding.strategy import write_strategy
from tests.sizes import resized

Configs = Mapping[str, Decoder]
Values = Callable[..., dict[str, LazyTensor]]
Same = Callable[..., None]
Tensors = Mapping[str, LazyTensor]
TYPES = {"bloom": "F32", "gpt2": "F16", "llama": "BF16", "qwen2": "F32"}


def cut(
    target: Path,
    tensors: Tensors,
    model: Decoder,
    tensor: int,
    data: int = 1,
    format: ShardFormat = "ckpt",
    **options: Any,
) -> Path:
    given: dict[str, Any] = {"workers": 2, "overwrite": False, "extra": {}, **options}
    cutting = Cutting.of_model(model, Ranks(0, data, tensor), format, vocab_parallel=True)
    write_shards(target, tensors, cutting, advance=lambda size: None, **given)
    return target


def without_manifests(folder: Path) -> Path:
    """As another tool writes a set."""
    for path in folder.glob("rank_*/manifest.json"):
        path.unlink()
    return folder


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize(("name", "dtype"), TYPES.items())
def test_there_and_back(
    tmp_path: Path,
    configs: Configs,
    values: Values,
    same: Same,
    name: str,
    dtype: str,
    format: ShardFormat,
) -> None:
    """1 -> 2 -> 4 -> 1 and 2 -> dp2tp2 -> tp4 -> 1; the key/value heads of two models are 2."""
    config = configs[name]
    source = values(config, dtype)
    two = cut(tmp_path / "2", source, config, 2, format=format)
    four = cut(tmp_path / "4", whole_tensors(two, config), config, 4, format=format)
    other: ShardFormat = "ckpt" if format == "safetensors" else "safetensors"
    grid = cut(tmp_path / "22", whole_tensors(two, config), config, 2, 2, format=other)
    late = cut(tmp_path / "late", whole_tensors(grid, config), config, 4, format=format)
    for folder in (two, four, grid, late):
        same(whole_tensors(folder, config), source)
    for rank in range(4):
        file = f"rank_{rank}/checkpoint_{rank}.{format}"
        assert (four / file).read_bytes() == (late / file).read_bytes()
    merged = tmp_path / f"merged.{format}"
    write_merged(
        merged, whole_tensors(four, config), format, overwrite=False, advance=lambda size: None
    )
    same(whole_tensors(merged, config), source)


@pytest.mark.parametrize(("name", "dtype"), TYPES.items())
def test_mindspore_transforms_to_the_same_shards(
    tmp_path: Path, configs: Configs, values: Values, same: Same, name: str, dtype: str
) -> None:
    import mindspore as ms

    config = configs[name]
    (tmp_path / "whole/rank_0").mkdir(parents=True)
    write_ckpt(tmp_path / "whole/rank_0/x.ckpt", values(config, dtype))
    source = whole_tensors(tmp_path / "whole", config)
    sets = {"tp2": (1, 2), "dp2tp2": (2, 2), "tp4": (1, 4)}
    for group, (data, tensor) in sets.items():
        cut(tmp_path / group, source, config, tensor, data)
    steps = [("whole", "tp2"), ("tp2", "tp4"), ("tp2", "dp2tp2"), ("dp2tp2", "tp4")]
    for before, after in [*steps, ("tp4", "whole")]:
        strategies = [
            None if one == "whole" else str(tmp_path / one / "strategy/ckpt_strategy_rank_0.ckpt")
            for one in (before, after)
        ]
        theirs = tmp_path / f"{before}-{after}"
        ms.transform_checkpoints(str(tmp_path / before), str(theirs), "ms", *strategies)
        for rank, folder in enumerate(sorted((tmp_path / after).glob("rank_*"))):
            found = open_ckpt(theirs / f"rank_{rank}/ms{rank}.ckpt")
            same(open_ckpt(next(folder.glob("*.ckpt"))), found)


def test_shards_of_mindspore_are_read(
    tmp_path: Path, configs: Configs, values: Values, same: Same
) -> None:
    """The output of ms.transform_checkpoints, by its strategy and by its shapes alone."""
    import mindspore as ms

    model = configs["qwen2"]
    source = values(model)
    (tmp_path / "whole/rank_0").mkdir(parents=True)
    write_ckpt(tmp_path / "whole/rank_0/x.ckpt", source)
    strategy = tmp_path / "strategy.ckpt"
    write_strategy(strategy, strategy_of(model, Ranks(0, 2, 4)))
    theirs = tmp_path / "theirs"
    ms.transform_checkpoints(str(tmp_path / "whole"), str(theirs), "x", None, str(strategy))
    for given, by in ((strategy, f"the strategy {strategy}"), (None, "the shapes")):
        found = open_shards(theirs, model, given)
        assert (len(found.files), found.layout_source, found.describe()) == (8, by, "tp=4 dp=2")
        same(found.whole(), source)


def test_one_rank_needs_no_strategy(
    tmp_path: Path, configs: Configs, values: Values, same: Same
) -> None:
    """As a training on one device leaves it: with the model known, and without. Of two ranks
    without a strategy nobody knows how they are cut."""
    model = configs["llama"]
    source = values(model)
    write_ckpt(tmp_path / "set/rank_0/llama_rank_0-5_2.ckpt", source)
    for known in (model, None):
        found = open_shards(tmp_path / "set", known)
        assert found.describe() == "tp=1 dp=1"
        same(found.whole(), source)
    shutil.copytree(tmp_path / "set/rank_0", tmp_path / "set/rank_1")
    with pytest.raises(ArtifactError, match="nothing describes how its 2 ranks are sharded"):
        open_shards(tmp_path / "set", None)


def test_a_set_in_stages_of_a_pipeline(
    tmp_path: Path, configs: Configs, values: Values, same: Same
) -> None:
    """Layers of two stages, each cut in two, as trainings leave them."""
    from mindspore.train import node_strategy_pb2

    model = configs["bloom"]
    source = values(model, "F16")
    cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
    late = {name for name in source if name.startswith(("blocks.1.", "ln_f."))}
    for stage in range(2):
        for rank in range(2):
            held = cutting.of_rank(rank, source)
            number = 2 * stage + rank
            kept = {name: one for name, one in held.items() if (name in late) == bool(stage)}
            moment = {"adam_m.x": LazyTensor((1,), "F32", lambda: np.ones(1, np.float32))}
            write_ckpt(tmp_path / f"set/rank_{number}/m_rank_{number}-300_8.ckpt", kept | moment)
            write_ckpt(tmp_path / f"set/rank_{number}/m_rank_{number}-99_8.ckpt", held)  # older
            file = tmp_path / f"strategy/ckpt_strategy_rank_{number}.ckpt"
            write_strategy(file, cutting.strategy)
            message = node_strategy_pb2.ParallelStrategyMap.FromString(file.read_bytes())
            message.parallel_strategy_item[0].parallel_strategys.stage = stage
            names = {item.param_name: item for item in message.parallel_layout_item}
            del message.parallel_layout_item[:]
            message.parallel_layout_item.extend(names[name] for name in kept)
            file.write_bytes(message.SerializeToString())
    found = open_shards(tmp_path / "set", model, tmp_path / "strategy")
    assert found.describe() == "tp=2 dp=1 pp=2"
    same(found.whole(), source)
    last = tmp_path / "set/rank_3/m_rank_3-300_8.ckpt"
    held = open_ckpt(last)
    name = next(name for name in held if name.startswith("ln_f."))
    other = held[name].read() + 1
    write_ckpt(last, held | {name: LazyTensor(other.shape, "F16", lambda: other)})
    with pytest.raises(ArtifactError, match=rf"rank_3-300.* than .*rank_2-300.*: {name} holds"):
        open_shards(tmp_path / "set", model, tmp_path / "strategy")
    write_ckpt(last, {key: one for key, one in held.items() if key != name})
    with pytest.raises(ArtifactError, match=rf"(?s)rank_3-300.* {name}"):
        open_shards(tmp_path / "set", model, tmp_path / "strategy")


def test_only_the_pieces_that_are_asked_for_are_read(
    tmp_path: Path, configs: Configs, values: Values
) -> None:
    model = configs["llama"]
    source = values(model)
    found = open_shards(cut(tmp_path / "4", source, model, 4), model)
    name = "model.layers.0.attention.wo.weight"  # cut along its second axis, 64 in 4

    def fail(*_: Any) -> Any:
        raise AssertionError("read, but not asked for")

    held = list(found.held)
    held[3] = {**held[3], name: replace(held[3][name], read=fail, part=fail)}
    whole = replace(found, held=tuple(held)).whole()
    for index in ((slice(4, 9), slice(0, 16)), (slice(0, 32), slice(10, 40))):
        found = whole[name].piece(index)
        assert np.array_equal(found, source[name].read()[index]) and found.flags.c_contiguous
    with pytest.raises(AssertionError, match="not asked for"):
        whole[name].piece((slice(4, 9), slice(40, 50)))


class TestRank:
    """tensors_for: one rank's pieces of anything."""

    @pytest.mark.parametrize("vocab_parallel", [True, False])
    def test_of_a_whole_checkpoint(
        self, tmp_path: Path, config: Decoder, values: Values, same: Same, vocab_parallel: bool
    ) -> None:
        source = values(config, "BF16")
        write_safetensors(tmp_path / "x.safetensors", source, {})
        cutting = Cutting.of_model(config, Ranks(0, 1, 4), "ckpt", vocab_parallel=vocab_parallel)
        for rank in range(4):
            ranks = Ranks(rank, 1, 4)
            found = tensors_for(
                tmp_path / "x.safetensors", config, ranks, vocab_parallel=vocab_parallel
            )
            same(found, cutting.of_rank(rank, source))

    def test_with_the_same_layout_its_own_file_is_read(
        self, tmp_path: Path, configs: Configs, values: Values, same: Same
    ) -> None:
        model = configs["llama"]
        source = values(model)
        folder = cut(tmp_path / "2", source, model, 2)
        # The other rank's values are of no concern.
        content = bytearray((folder / "rank_1/checkpoint_1.ckpt").read_bytes())
        content[-700] ^= 1
        (folder / "rank_1/checkpoint_1.ckpt").write_bytes(content)
        cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
        same(tensors_for(folder, model, Ranks(0, 1, 2)), cutting.of_rank(0, source))
        with pytest.raises(ArtifactError, match="another file than the one that was written"):
            tensors_for(folder, model, Ranks(1, 1, 2))

    def test_a_strategy_says_nothing_of_a_whole_checkpoint(
        self, tmp_path: Path, configs: Configs, values: Values
    ) -> None:
        model = configs["llama"]
        write_ckpt(tmp_path / "x.ckpt", values(model))
        with pytest.raises(ArtifactError, match="a whole checkpoint, and s describes shards"):
            tensors_for(tmp_path / "x.ckpt", model, Ranks(), strategy=Path("s"))

    def test_another_layout_needs_auto_trans(
        self, tmp_path: Path, configs: Configs, values: Values, same: Same
    ) -> None:
        model = configs["llama"]
        source = values(model)
        folder = cut(tmp_path / "22", source, model, 2, 2)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        # More copies of the same cut are the same pieces.
        cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
        same(tensors_for(folder, model, Ranks(1, 1, 2)), cutting.of_rank(1, source))
        message = r"sharded for tp=2 dp=2 \(as the manifest says\), this run needs tp=4 dp=1"
        with pytest.raises(ArtifactError, match=message):
            tensors_for(folder, model, Ranks(0, 1, 4))
        cutting = Cutting.of_model(model, Ranks(0, 1, 4), "ckpt", vocab_parallel=True)
        for rank in range(4):
            found = tensors_for(folder, model, Ranks(rank, 1, 4), auto_trans=True)
            same(found, cutting.of_rank(rank, source))
        same(tensors_for(folder, model, Ranks(), auto_trans=True), source)
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert before == after and {path.name for path in tmp_path.iterdir()} == {"22"}


class TestBadInput:
    """Refusals and their reasons; every case starts from a good set of tp=2 dp=2."""

    @pytest.fixture
    def model(self, configs: Configs) -> Decoder:
        return configs["llama"]

    @pytest.fixture
    def folder(self, tmp_path: Path, model: Decoder, values: Values) -> Path:
        return cut(tmp_path / "set", values(model), model, 2, 2)

    @pytest.fixture
    def fails(self, folder: Path, model: Decoder) -> Callable[..., None]:
        def check(reason: str, strategy: Path | None = None) -> None:
            with pytest.raises(ArtifactError, match=reason):
                whole_tensors(folder, model, strategy)

        return check

    @pytest.mark.parametrize("manifests", [True, False])
    def test_a_missing_rank(
        self, folder: Path, fails: Callable[..., None], manifests: bool
    ) -> None:
        if not manifests:
            without_manifests(folder)
        shutil.move(folder / "rank_1", folder.parent)
        fails("rank 1 is missing of a set of rank_0 to rank_3")
        shutil.move(folder.parent / "rank_1", folder)
        shutil.rmtree(folder / "rank_3")
        if manifests:
            fails(r"3 ranks of a set of 4 \(tp=2 dp=2\); rank 3 is missing")
        else:
            fails("3 ranks, but their shapes are those of tp=2")

    def test_a_rank_twice(self, folder: Path, fails: Callable[..., None]) -> None:
        shutil.copytree(folder / "rank_1", folder / "rank_01")
        fails("rank 1 is in .* twice")
        shutil.rmtree(folder / "rank_01")
        shutil.rmtree(folder / "rank_1")
        shutil.copytree(folder / "rank_0", folder / "rank_1")
        fails("rank_1: holds the shard of rank 0, which occurs twice")

    def test_a_rank_of_another_checkpoint(
        self, folder: Path, model: Decoder, values: Values, fails: Callable[..., None]
    ) -> None:
        other = cut(folder.parent / "other", values(model, seed=1), model, 2, 2)
        shutil.rmtree(folder / "rank_1")
        shutil.copytree(other / "rank_1", folder / "rank_1")
        fails(".ckpt: of another set than .*checkpoint_1.ckpt: .* holds other values")

    def test_a_rank_of_another_type(
        self, folder: Path, model: Decoder, values: Values, fails: Callable[..., None]
    ) -> None:
        other = cut(folder.parent / "other", values(model, "F16"), model, 2, 2)
        shutil.rmtree(folder / "rank_2")
        shutil.copytree(other / "rank_2", folder / "rank_2")
        fails("of another set than .* is F16 and not F32")

    def test_a_tensor_that_the_model_has_not(
        self, folder: Path, model: Decoder, fails: Callable[..., None]
    ) -> None:
        """Of one stage each rank holds a part of every tensor, and nothing else."""
        without_manifests(folder)
        file = folder / "rank_1/checkpoint_1.ckpt"
        held = open_ckpt(file)
        name = "model.layers.1.attention.wq.weight"
        write_ckpt(file, held | {name.replace("1", "2"): held[name]})
        fails(r"(?s)checkpoint_1.ckpt \(rank 1 of 4, .* says\).*model.layers.2.attention.wq.weight")
        write_ckpt(file, {key: one for key, one in held.items() if key != name})
        fails("model.layers.1.attention.wq.weight")

    def test_large_tensors_are_not_compared_between_ranks(
        self,
        folder: Path,
        model: Decoder,
        fails: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Compared tensors are read in each start; small tensors tell another checkpoint."""
        without_manifests(folder)
        file, name = folder / "rank_2/checkpoint_2.ckpt", "model.layers.1.attention.wq.weight"
        held = open_ckpt(file)
        other = held[name].read() + 1
        write_ckpt(file, held | {name: LazyTensor(other.shape, "F32", lambda: other)})
        for limit, compared in ((other.nbytes, True), (other.nbytes - 1, False)):
            monkeypatch.setattr(shards, "MOST_COMPARED", limit)
            if compared:
                fails(f"checkpoint_2.ckpt: of another set than .*_0.ckpt: {name} holds other")
            else:
                assert open_shards(folder, model).describe() == "tp=2 dp=2"

    def test_mixed_formats_and_cuts(
        self, folder: Path, model: Decoder, values: Values, fails: Callable[..., None]
    ) -> None:
        other = cut(folder.parent / "o", values(model), model, 2, 2, "safetensors")
        shutil.rmtree(folder / "rank_3")
        shutil.copytree(other / "rank_3", folder / "rank_3")
        fails("of mixed formats")
        other = cut(folder.parent / "p", values(model), model, 4)
        shutil.rmtree(folder / "rank_3")
        shutil.copytree(other / "rank_3", folder / "rank_3")
        fails("of another set than rank_0: tp=4 dp=1 against tp=2 dp=2")
        (folder / "rank_3/manifest.json").unlink()
        fails("rank_3: no manifest.json, but other ranks have one")
        without_manifests(folder)
        fails(r"rank 3 of 4, sharded as the shapes says|of the wrong shape")

    def test_a_strategy_of_another_cut_or_model(
        self, folder: Path, model: Decoder, configs: Configs, fails: Callable[..., None]
    ) -> None:
        strategy = folder.parent / "s.ckpt"
        for ranks, reason in (
            (Ranks(0, 1, 2), r"4 ranks, but the strategy .* is of 2"),
            (Ranks(0, 1, 4), "not the strategy of .* its manifest shards"),
        ):
            write_strategy(strategy, strategy_of(model, ranks))
            fails(reason, strategy)
        without_manifests(folder)
        fails("of the wrong shape", strategy)
        write_strategy(strategy, strategy_of(configs["gpt2"], Ranks(0, 2, 2)))
        fails("the strategy of another model: it lacks", strategy)
        fails("no such strategy", folder / "gone")

    def test_a_truncated_and_a_changed_shard(
        self, folder: Path, model: Decoder, values: Values, fails: Callable[..., None]
    ) -> None:
        cut(folder, values(model), model, 4, overwrite=True)
        file = folder / "rank_2/checkpoint_2.ckpt"
        whole = file.read_bytes()
        file.write_bytes(whole[:-40])
        fails("checkpoint_2.ckpt: not a valid MindSpore checkpoint")
        changed = bytearray(whole)
        changed[-700] ^= 1
        file.write_bytes(changed)
        fails("checkpoint_2.ckpt: another file than the one that was written: sha256")
        file.unlink()
        fails("names the shard 'checkpoint_2.ckpt', which is not in the folder")

    @pytest.mark.parametrize(
        "change",
        [
            *({"schema": 2}, {"tp": "2"}, {"rank": 9}, {"dp": 0}, {"model": None}, {"sha256": 1}),
            *({"sha256": "x"}, {"rank": True}, {"tp": 10**9}, {"vocab_parallel": 1}, {"more": 1}),
            *({"file": "../rank_1/checkpoint_1.ckpt"}, {"file": "a\0"}, {"file": "gone.ckpt"}),
            {"model": {"model_type": "llama", "hidden_size": "x"}},
        ],
    )
    def test_a_broken_manifest(
        self, folder: Path, fails: Callable[..., None], change: dict[str, Any]
    ) -> None:
        path = folder / "rank_0/manifest.json"
        whole = json.loads(path.read_text())
        path.write_text(json.dumps(whole | {"dp": 3}))
        fails("rank_0/manifest.json: edited or damaged")
        del whole["checksum"]
        path.write_text(json.dumps(whole | change))
        fails("rank_0/manifest.json: ")
        path.write_text("{")
        fails("not the manifest of a shard")

    def test_another_model(self, folder: Path, model: Decoder) -> None:
        without_manifests(folder)
        other = resized(model, intermediate_size=100)
        with pytest.raises(ArtifactError, match="no known sharding of the model"):
            whole_tensors(folder, other)

    def test_an_empty_rank(self, folder: Path, fails: Callable[..., None]) -> None:
        without_manifests(folder)
        (folder / "rank_1/checkpoint_1.ckpt").unlink()
        fails("holds no .ckpt and no .safetensors file")


@pytest.mark.parametrize("vocab_parallel", [True, False])
def test_a_vocabulary_that_is_cut_otherwise_is_read(
    folder: Path, model: Decoder, vocab_parallel: bool
) -> None:
    """run_mode=shard leaves it whole by default, as MindFormers, and a run cuts it."""
    ranks = Ranks(1, 1, 2)
    found = tensors_for(folder, model, ranks, vocab_parallel=vocab_parallel)
    for name, tensor in pieces(
        random_checkpoint(model, 0), model, ranks, vocab_parallel=vocab_parallel
    ).items():
        assert np.array_equal(found[name].read(), tensor.read()), name
    with pytest.raises(ArtifactError, match="sharded for tp=2 dp=1"):
        tensors_for(folder, model, Ranks(), vocab_parallel=vocab_parallel)


def test_shards_verified_by_the_launcher_are_not_verified_again(
    folder: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(shards, "digest_of", counted)
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
