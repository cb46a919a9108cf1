"""Strategy files, against MindSpore's own message and functions."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.weights.sharding.partition import Layout, Strategy, strategy_of
from lite_runner.weights.sharding.strategy import merge_strategies, read_strategy, write_strategy
from tests.mutations import mutated

Configs = Mapping[str, Decoder]


@pytest.mark.parametrize(("data", "tensor"), [(1, 1), (1, 2), (2, 2), (1, 4), (2, 4)])
def test_a_written_strategy_is_read_back_as_our_layout(
    tmp_path: Path, config: Decoder, data: int, tensor: int
) -> None:
    file = tmp_path / "s.ckpt"
    written = strategy_of(config, Ranks(0, data, tensor))
    write_strategy(file, written)
    found = read_strategy(file)
    assert (found.ranks, found.stages, found.devices) == (data * tensor, 1, data * tensor)
    assert found == written


def test_mindspore_reads_the_same(tmp_path: Path, configs: Configs) -> None:
    from mindspore.parallel._parallel_serialization import _extract_layout_map
    from mindspore.train import node_strategy_pb2

    file = tmp_path / "s.ckpt"
    write_strategy(file, strategy_of(configs["llama"], Ranks(0, 2, 4)))
    message = node_strategy_pb2.ParallelStrategyMap.FromString(file.read_bytes())
    assert message.IsInitialized() and message.SerializeToString() == file.read_bytes()
    found = _extract_layout_map(str(file))
    block = "model.layers.0.attention."
    assert found[f"{block}wq.weight"][:3] == [[2, 4], [0, -1], []]
    assert found[f"{block}wo.weight"][:2] == [[2, 4], [-1, 0]]
    assert found[f"{block}wk.weight"][:2] == [[2, 2, 2], [1, -1]]  # 2 key/value heads, 4 ranks
    assert found["model.norm_out.weight"][:2] == [[2, 4], [-1]]


def test_an_axis_that_is_cut_twice(tmp_path: Path) -> None:
    """MindSpore's Layout(("dp", "mp"), ...) lists the axes of the matrix for each of the tensor."""
    from mindspore.train import node_strategy_pb2

    message = node_strategy_pb2.ParallelStrategyMap(current_stage=0)
    held = message.parallel_layout_item.add(param_name="w").parallel_layouts
    held.dev_matrix.add(dim=[2, 3])
    held.tensor_map.add(dim=[1, 0])
    held.tensor_map.add(dim=[-1])
    held.field = held.opt_weight_shard_step = held.opt_weight_shard_size = 0
    file = tmp_path / "s.ckpt"
    file.write_bytes(message.SerializeToString())
    layout = read_strategy(file).layouts["w"]
    assert layout.parts == (6, 1)
    assert [layout.bounds((12, 5), rank)[0].start for rank in range(6)] == [0, 2, 4, 6, 8, 10]


def of_stage(path: Path, stage: int, layouts: Mapping[str, Layout]) -> None:
    """A file as MindSpore writes it for one stage of a pipeline."""
    from mindspore.train import node_strategy_pb2

    write_strategy(path, Strategy(layouts))
    message = node_strategy_pb2.ParallelStrategyMap.FromString(path.read_bytes())
    message.current_stage = stage
    message.parallel_strategy_item[0].parallel_strategys.stage = stage
    path.write_bytes(message.SerializeToString())


def test_stages_are_merged_as_mindspore_does(tmp_path: Path) -> None:
    import mindspore as ms

    cut, whole = Layout((1, 2), ((0,), ())), Layout((1, 2), ((),))
    folder = tmp_path / "strategy"
    folder.mkdir()
    for rank in range(4):  # ranks of a stage write the same
        file = folder / f"ckpt_strategy_rank_{rank}.ckpt"
        of_stage(file, rank // 2, {f"w{rank // 2}": cut, "shared": whole})
    merge_strategies(folder, tmp_path / "ours.ckpt")
    ms.merge_pipeline_strategys(str(folder), str(tmp_path / "theirs.ckpt"))
    read = ms.build_searched_strategy
    ours, theirs = (read(str(tmp_path / f"{name}.ckpt")) for name in ("ours", "theirs"))
    assert ours == theirs and set(ours) == {"0-w0", "0-shared", "1-w1", "1-shared"}
    for path in (folder, tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt"):
        found = read_strategy(path)
        assert (found.stages, found.devices, found.ranks) == (2, 2, 4)
        assert {name: one.stage for name, one in found.layouts.items()} == {
            **{"w0": 0, "w1": 1, "shared": 0}
        }


def test_merging_again_leaves_the_merged_file_out(tmp_path: Path) -> None:
    """reference/004 merges into the folder that it reads, and users run it twice."""
    layouts = {"w": Layout((2,), ((0,),))}
    of_stage(tmp_path / "ckpt_strategy_rank_0.ckpt", 0, layouts)
    merge_strategies(tmp_path, tmp_path / "ckpt_strategy.ckpt")
    first = (tmp_path / "ckpt_strategy.ckpt").read_bytes()
    merge_strategies(tmp_path, tmp_path / "ckpt_strategy.ckpt")
    assert (tmp_path / "ckpt_strategy.ckpt").read_bytes() == first


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no layout"),
        (b"\xff" * 40, "not a strategy file"),
        (b"\x0a\x05hello", "not a strategy file"),
        (
            b"\x08\x00\x1a\x0f\x0a\x03w\xff\xfe\x12\x08\x28\x00\x30\x00\x38\x00\x0a\x00",
            "UTF-8|utf-8",
        ),
    ],
)
def test_files_that_are_no_strategy_are_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "s.ckpt").write_bytes(content)
    with pytest.raises(ArtifactError, match=reason):
        read_strategy(tmp_path / "s.ckpt")


@pytest.mark.parametrize(
    "change",
    [
        {"dev_matrix": []},
        {"dev_matrix": [0, 2]},
        {"dev_matrix": [1 << 20, 2]},
        {"tensor_map": [2, -1]},
        {"tensor_map": [-2, -1]},
        {"tensor_map": [0, 0]},
    ],
)
def test_impossible_layouts(tmp_path: Path, change: dict[str, list[int]]) -> None:
    from mindspore.train import node_strategy_pb2

    numbers: dict[str, Any] = {"dev_matrix": [1, 2], "tensor_map": [0, -1]} | change
    message = node_strategy_pb2.ParallelStrategyMap(current_stage=0)
    held = message.parallel_layout_item.add(param_name="w").parallel_layouts
    held.dev_matrix.add(dim=numbers["dev_matrix"])
    held.tensor_map.add(dim=numbers["tensor_map"])
    held.field = held.opt_weight_shard_step = held.opt_weight_shard_size = 0
    (tmp_path / "s.ckpt").write_bytes(message.SerializeToString())
    with pytest.raises(ArtifactError, match="impossible layout"):
        read_strategy(tmp_path / "s.ckpt")


def test_every_truncation_is_refused_or_of_fewer_parameters(
    tmp_path: Path, configs: Configs
) -> None:
    file = tmp_path / "s.ckpt"
    write_strategy(file, strategy_of(configs["gpt2"], Ranks(0, 1, 2)))
    whole, all_of_it = file.read_bytes(), read_strategy(file).layouts
    for length in range(0, len(whole), 11):
        file.write_bytes(whole[:length])
        try:
            found = read_strategy(file)
        except ArtifactError as error:
            assert str(file) in str(error)
        else:
            assert len(found.layouts) < len(all_of_it)


def test_files_that_do_not_belong_together(
    tmp_path: Path, configs: Configs, same: Callable[..., None]
) -> None:
    for rank, tensor in enumerate((2, 4)):
        strategy = strategy_of(configs["gpt2"], Ranks(0, 1, tensor))
        write_strategy(tmp_path / f"ckpt_strategy_rank_{rank}.ckpt", strategy)
    with pytest.raises(ArtifactError, match=r"its layout of .* differs from another file"):
        read_strategy(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="holds no strategy file"):
        read_strategy(tmp_path / "empty")
    with pytest.raises(ArtifactError, match="no such strategy"):
        read_strategy(tmp_path / "gone")
    of_stage(tmp_path / "late.ckpt", 1, {"w": Layout((2,), ((0,),))})
    with pytest.raises(ArtifactError, match=r"holds the pipeline stages \[1\], expected 0 to 1"):
        read_strategy(tmp_path / "late.ckpt")


def test_a_cut_for_the_optimizer_is_refused(tmp_path: Path) -> None:
    from mindspore.train import node_strategy_pb2

    file = tmp_path / "s.ckpt"
    write_strategy(file, Strategy({"w": Layout((2, 2), ((0,), ()))}))
    message = node_strategy_pb2.ParallelStrategyMap.FromString(file.read_bytes())
    held = message.parallel_layout_item[0].parallel_layouts
    held.opt_weight_shard_step, held.opt_weight_shard_size = 2, 2
    file.write_bytes(message.SerializeToString())
    with pytest.raises(ArtifactError, match="w is also sharded for the optimizer"):
        read_strategy(file)


def test_mutations_of_a_json_file_are_refused_or_read(tmp_path: Path, configs: Configs) -> None:
    file, generator = tmp_path / "s.json", random.Random(0)
    write_strategy(file, strategy_of(configs["gpt2"], Ranks(0, 1, 2)))
    whole = json.loads(file.read_text())
    layouts = whole["parallel_layout_item"]
    whole["parallel_layout_item"] = {name: layouts[name] for name in list(layouts)[:3]}
    for _ in range(500):
        file.write_text(json.dumps(mutated(copy.deepcopy(whole), generator)))
        try:
            read_strategy(file)
        except ArtifactError as error:
            assert str(file) in error.message
