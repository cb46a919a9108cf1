"""Strategy files that MindSpore writes on Ascend, against its own reader of them.

- A single list of axes is told from a list for each axis by an empty TensorMap behind it, which is
  dropped where there are several. Source: mindspore 2.10, parallel/_parallel_serialization.py,
  _convert_to_list.
- opt_weight_shard_step 0 or opt_weight_shard_size 0: not cut for the optimizer. Source: the same,
  parallel/_tensor.py, _construct_tensor_layout_for_opt_shard.
- A name that ends in .json is JSON. Source: parallel/_parallel_serialization.py,
  _build_searched_strategy, _build_json_strategy and _merge_json_strategy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights.sharding.partition import Layout
from lite_runner.weights.sharding.strategy import merge_strategies, read_strategy

JSON: dict[str, Any] = {
    "current_stage": 0,
    "parallel_strategy_item": {"MatMul-op0": {"stage": 0, "parallel_strategy": [[1, 2], [2, 2]]}},
    "parallel_layout_item": {
        "wq": {
            "dev_matrix": [2, 2],
            "field": 0,
            "opt_weight_shard_size": 0,
            "opt_weight_shard_step": 0,
            "param_split_shape": [],
            "indices_offset": [],
            "tensor_map": [0, -1],
        },
        "norm": {
            "dev_matrix": [2, 2],
            "field": 0,
            "opt_weight_shard_size": -1,
            "opt_weight_shard_step": 0,
            "tensor_map": [-1],
        },
    },
}


def written(path: Path, *maps: list[int], size: int = 0, step: int = 0) -> Path:
    """A file of one parameter, as protobuf's C++ writes it."""
    from mindspore.train import node_strategy_pb2

    message = node_strategy_pb2.ParallelStrategyMap(current_stage=0)
    item = message.parallel_strategy_item.add(node_name="MatMul-op0")
    item.parallel_strategys.stage = 0
    held = message.parallel_layout_item.add(param_name="w").parallel_layouts
    held.dev_matrix.add(dim=[2, 2])
    for one in maps:
        held.tensor_map.add(dim=one)
    held.param_split_shape.add()
    held.indices_offset.add()
    held.field, held.opt_weight_shard_size, held.opt_weight_shard_step = 0, size, step
    path.write_bytes(message.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("maps", "theirs", "ours"),
    [
        ([[0, -1]], [0, -1], ((0,), ())),
        ([[1, 0], [-1]], [[1, 0], [-1]], ((1, 0), ())),
        ([[1, 0], []], [[1, 0]], ((1, 0),)),
        ([[1, 0], [-1], []], [[1, 0], [-1]], ((1, 0), ())),
    ],
)
def test_empty_lists_of_axes(
    tmp_path: Path, maps: list[list[int]], theirs: list[Any], ours: tuple[tuple[int, ...], ...]
) -> None:
    from mindspore.parallel._parallel_serialization import _extract_layout_map

    path = written(tmp_path / "s.ckpt", *maps)
    assert _extract_layout_map(str(path))["w"][1] == theirs
    assert read_strategy(path).layouts["w"] == Layout((2, 2), ours)


@pytest.mark.parametrize(
    ("size", "step", "cut"), [(2, 0, False), (-1, 0, False), (0, 2, False), (2, 2, True)]
)
def test_a_size_without_a_step_is_no_cut(tmp_path: Path, size: int, step: int, cut: bool) -> None:
    from mindspore.parallel._tensor import _construct_tensor_layout_for_opt_shard

    whole = _construct_tensor_layout_for_opt_shard([2, 2], [0, -1], step, size, [8, 8])
    assert (whole == ([2, 2], [0, -1], [8, 8])) == (not cut)
    path = written(tmp_path / "s.ckpt", [0, -1], size=size, step=step)
    if cut:
        with pytest.raises(ArtifactError, match="w is also sharded for the optimizer"):
            read_strategy(path)
    else:
        assert read_strategy(path).layouts["w"] == Layout((2, 2), ((0,), ()))


def json_file(path: Path, raw: Any = JSON) -> Path:
    path.write_text(json.dumps(raw))
    return path


def test_json_is_read_as_mindspore_reads_it(tmp_path: Path) -> None:
    from mindspore.parallel._parallel_serialization import _extract_layout_map

    path = json_file(tmp_path / "ckpt_strategy_rank_0.json")
    theirs = _extract_layout_map(str(path))
    assert (theirs["wq"][:2], theirs["norm"][:2]) == ([[2, 2], [0, -1]], [[2, 2], [-1]])
    for where in (path, tmp_path):
        found = read_strategy(where)
        assert found.layouts == {"wq": Layout((2, 2), ((0,), ())), "norm": Layout((2, 2), ((),))}
        assert (found.ranks, found.stages) == (4, 1)


def test_axes_that_are_cut_twice_in_json(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(JSON))
    raw["parallel_layout_item"]["wq"]["tensor_map"] = [[1, 0], -1]
    raw["parallel_layout_item"]["norm"]["tensor_map"] = [[1, 0]]
    raw["parallel_strategy_item"]["MatMul-op0"]["parallel_strategy"] = [[[1, 2], [2]], [4]]
    found = read_strategy(json_file(tmp_path / "s.json", raw)).layouts
    assert found["wq"].tensor_map == ((1, 0), ()) and found["norm"].tensor_map == ((1, 0),)


def test_stages_in_json_are_merged_as_mindspore_does(tmp_path: Path) -> None:
    import mindspore as ms

    folder = tmp_path / "strategy"
    folder.mkdir()
    for stage in range(2):
        raw = json.loads(json.dumps(JSON))
        raw["parallel_strategy_item"]["MatMul-op0"]["stage"] = stage
        raw["parallel_layout_item"][f"only{stage}"] = raw["parallel_layout_item"].pop("wq")
        json_file(folder / f"ckpt_strategy_rank_{stage}.json", raw)
    ms.merge_pipeline_strategys(str(folder), str(tmp_path / "theirs.json"))
    for name in ("ours.json", "ours.ckpt"):
        merge_strategies(folder, tmp_path / name)
    read = ms.build_searched_strategy
    assert read(str(tmp_path / "ours.json")) == read(str(tmp_path / "theirs.json"))
    assert set(read(str(tmp_path / "ours.ckpt"))) == {"0-only0", "1-only1", "0-norm", "1-norm"}
    for path in (folder, *tmp_path.glob("*s.*")):
        assert (read_strategy(path).stages, read_strategy(path).ranks) == (2, 8)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not a strategy file: Expecting value"),
        ("[]", "not a strategy file: expected an object"),
        ("{}", "holds no layout"),
        ("[" * 100_000, "not a strategy file"),
        ('{"parallel_layout_item": []}', r"parallel_layout_item: got \[\]"),
        ('{"parallel_layout_item": {"w": {"dev_matrix": ["2"]}}}', "not a strategy file"),
        ('{"parallel_layout_item": {"w": {"dev_matrix": [1e3]}}}', "not a strategy file"),
        ('{"parallel_layout_item": {"w": {"field": 99999999999999999999}}}', "not a strategy"),
        ('{"parallel_layout_item": {"w": {"dev_matrix": [2], "tensor_map": [5]}}}', "impossible"),
    ],
)
def test_json_that_is_no_strategy(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(ArtifactError, match=reason):
        read_strategy(path)
