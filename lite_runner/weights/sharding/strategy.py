"""MindSpore's strategy files: the layout of each parameter over the ranks of a job.

For each parameter a file holds the device matrix that the ranks form and, for each axis of the
tensor, the axis of that matrix that shards it. A name that ends in .json is JSON, any other the
message `ParallelStrategyMap`, as mindspore/parallel/_parallel_serialization.py (2.10) has it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write, parse_json
from lite_runner.system.protobuf import parse_message
from lite_runner.weights.sharding.partition import Layout, Strategy

HINT = "give src_strategy_path_or_dir= the ckpt_strategy_rank_N.ckpt that the training wrote"
MAX_BYTES = 64 * 2**20
MAX_RANKS = 1 << 16
# The part of MindSpore's node_strategy.proto that is read or written. All lists of numbers have
# the same encoding, whatever their message is called there.
_PROTO = """
message Numbers { repeated int64 dim = 1; }
message ParallelStrategys { required int64 stage = 1; repeated Numbers parallel_strategy = 2; }
message ParallelStrategyItem {
  required string node_name = 1; required ParallelStrategys parallel_strategys = 2;
}
message ParallelLayouts {
  repeated Numbers dev_matrix = 1; repeated Numbers tensor_map = 2;
  repeated Numbers param_split_shape = 3; repeated Numbers indices_offset = 4;
  required int64 field = 5;
  required int64 opt_weight_shard_step = 6; required int64 opt_weight_shard_size = 7;
}
message ParallelLayoutItem {
  required string param_name = 1; required ParallelLayouts parallel_layouts = 2;
}
message ParallelStrategyMap {
  required int64 current_stage = 1;
  repeated ParallelStrategyItem parallel_strategy_item = 2;
  repeated ParallelLayoutItem parallel_layout_item = 3;
}
"""
_LISTS = ("dev_matrix", "param_split_shape", "indices_offset")  # fields of a layout, one each
_NUMBERS = ("field", "opt_weight_shard_step", "opt_weight_shard_size")


def read_strategy(path: Path) -> Strategy:
    """The strategy in a file, or in the files of a folder, one per rank or per pipeline stage.

    Raises ArtifactError for invalid files, or stages that do not belong together.
    """
    files = _files(path)
    found: dict[str, Layout] = {}
    stages: set[int] = set()
    for file in {file.read_bytes(): file for file in files}.values():
        for name, layout in _layouts(_read_message(file), file):
            # A parameter of two stages is read from the first.
            if name not in found or layout.stage < found[name].stage:
                found[name] = layout
            elif layout.stage == found[name].stage and layout != found[name]:
                raise ArtifactError(
                    f"{file}: its layout of {name} differs from another file's in {path}",
                    "keep the strategy files of one run in the folder",
                )
            stages.add(layout.stage)
    if stages != set(range(len(stages))):
        raise ArtifactError(
            f"{path}: holds the pipeline stages {sorted(stages)}, expected 0 to {max(stages)}", HINT
        )
    if len({layout.devices for layout in found.values()}) != 1:
        raise ArtifactError(f"{path}: the parameters do not lie on the same number of ranks", HINT)
    return Strategy(found, len(stages))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ArtifactError(f"{path}: no such strategy file or folder", HINT)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.ckpt")) or sorted(path.glob("*.json"))
    if not files:
        raise ArtifactError(f"{path}: the folder holds no strategy file (*.ckpt, *.json)", HINT)
    for file in files:
        if file.stat().st_size > MAX_BYTES:
            raise ArtifactError(
                f"{file}: {file.stat().st_size:,} bytes, too many for a strategy file", HINT
            )
    return files


def _layouts(parsed: Any, file: Path) -> Iterator[tuple[str, Layout]]:
    """Each parameter and its layout; a name of a merged file starts with its stage."""
    for item in parsed.parallel_layout_item:
        merged = re.fullmatch(r"(\d{1,6})-(.+)", item.param_name)
        name = merged[2] if merged else item.param_name
        stage = int(merged[1]) if merged else _stage(parsed)
        held = item.parallel_layouts
        # A size without a step has no meaning.
        if held.opt_weight_shard_size and held.opt_weight_shard_step:
            raise ArtifactError(
                f"{file}: {name} is also sharded for the optimizer (enable_parallel_optimizer),"
                " which "
                "is not available",
                "merge the checkpoint with mindspore.transform_checkpoints first",
            )
        matrix = tuple(held.dev_matrix[0].dim) if held.dev_matrix else ()
        axes = _tensor_map(held)
        whole = tuple(tuple(axis for axis in some if axis != -1) for some in axes)
        named = [axis for some in whole for axis in some]
        if (
            not matrix
            or min(matrix) < 1
            or math.prod(matrix) > MAX_RANKS
            or len(set(named)) != len(named)
            or not all(0 <= axis < len(matrix) for axis in named)
        ):
            raise ArtifactError(
                f"{file}: {name} has the impossible layout {list(matrix)}, {axes}", HINT
            )
        yield name, Layout(matrix, whole, stage)


def _stage(content: Any) -> int:
    """The stage of the first operator, as in MindSpore."""
    stages = (item.parallel_strategys.stage for item in content.parallel_strategy_item)
    return next(stages, 0)


def write_strategy(path: Path, strategy: Strategy) -> None:
    """Write a strategy of one stage, as MindSpore and MindFormers read it."""
    content = _strategy_map()(current_stage=0)
    # MindSpore takes the stage from the first operator, so one is required.
    operator = content.parallel_strategy_item.add(node_name="model")
    operator.parallel_strategys.stage = 0
    for name, layout in strategy.layouts.items():
        held = content.parallel_layout_item.add(param_name=name).parallel_layouts
        held.dev_matrix.add(dim=layout.dev_matrix)
        held.tensor_map.add(dim=[axes[0] if axes else -1 for axes in layout.tensor_map])
        held.param_split_shape.add()
        held.indices_offset.add()
        held.field = held.opt_weight_shard_step = held.opt_weight_shard_size = 0
    _write_message(path, content)


def merge_strategies(folder: Path, out: Path) -> None:
    """Join the files of all pipeline stages in `folder`, as mindspore.merge_pipeline_strategys.

    Raises ArtifactError for files that are not strategies or do not belong together.
    """
    read_strategy(folder)  # reports the error of any of them
    joined = _strategy_map()(current_stage=1)
    seen: set[int] = set()
    for file in _files(folder):
        if file.resolve() == out.resolve():
            continue
        content = _read_message(file)
        stage = _stage(content)
        if stage in seen:
            continue
        seen.add(stage)
        for item in content.parallel_layout_item:
            item.param_name = f"{stage}-{item.param_name}"
        joined.parallel_strategy_item.extend(content.parallel_strategy_item)
        joined.parallel_layout_item.extend(content.parallel_layout_item)
    _write_message(out, joined)


def _read_message(file: Path) -> Any:
    """The message in a file, with at least one layout. Raises ArtifactError."""
    content = file.read_bytes()
    try:
        found = (
            _of_json(parse_json(content))
            if file.suffix == ".json"
            else parse_message(_strategy_map(), content)
        )
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{file}: not a strategy file: {error}", HINT) from error
    if not found.IsInitialized() or not found.parallel_layout_item:
        raise ArtifactError(f"{file}: not a strategy file: it holds no layout", HINT)
    return found


def _write_message(file: Path, content: Any) -> None:
    """Write a message in the form that the name of the file says."""
    with atomic_write(file) as target:
        if file.suffix == ".json":
            target.write(json.dumps(_json_of(content)).encode())
        else:
            target.write(content.SerializeToString())


@functools.cache
def _strategy_map() -> Any:
    """The class of ParallelStrategyMap, in a pool of its own: MindSpore has the same names in the
    shared one."""
    kinds = descriptor_pb2.FieldDescriptorProto
    package = "mindspore.straspb"
    file = descriptor_pb2.FileDescriptorProto(
        name="node_strategy.proto", package=package, syntax="proto2"
    )
    for name, body in re.findall(r"message (\w+) {([^}]*)}", _PROTO):
        message = file.message_type.add(name=name)
        for label, kind, field, number in re.findall(r"(\w+) (\w+) (\w+) = (\d+);", body):
            plain = kind in ("int64", "string")
            message.field.add(
                name=field,
                number=int(number),
                label=getattr(kinds, f"LABEL_{label.upper()}"),
                type=getattr(kinds, f"TYPE_{kind.upper()}" if plain else "TYPE_MESSAGE"),
                type_name=None if plain else f".{package}.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    described = pool.FindMessageTypeByName(f"{package}.ParallelStrategyMap")
    return message_factory.GetMessageClass(described)


def _tensor_map(held: Any) -> list[tuple[int, ...]]:
    """The axes of the device matrix for each axis of a tensor; -1 is none.

    One list has an axis of the matrix for each axis of the tensor. Several have a list for each,
    and MindSpore's C++ puts an empty one behind a single such list, to tell it from the first form.
    """
    lists = [tuple(one.dim) for one in held.tensor_map]
    if len(lists) == 1:
        return [(axis,) for axis in lists[0]]
    return [axes for axes in lists if axes]


def _of_json(raw: Any) -> Any:
    """Raises ValueError and TypeError for JSON of another kind."""
    found = _strategy_map()(current_stage=_get(raw, "current_stage", 0))
    for name, item in _get(raw, "parallel_strategy_item", {}).items():
        operator = found.parallel_strategy_item.add(node_name=name).parallel_strategys
        operator.stage = _get(item, "stage", 0)
        for axes in _get(item, "parallel_strategy", []):
            if isinstance(axes, list) and all(isinstance(axis, int) for axis in axes):
                operator.parallel_strategy.add(dim=axes)  # a message has no nested lists
    for name, item in _get(raw, "parallel_layout_item", {}).items():
        held = found.parallel_layout_item.add(param_name=name).parallel_layouts
        for field in _LISTS:
            getattr(held, field).add(dim=_get(item, field, []))
        for field in _NUMBERS:
            setattr(held, field, _get(item, field, 0))
        axes = _get(item, "tensor_map", [])
        if not any(isinstance(axis, list) for axis in axes):
            held.tensor_map.add(dim=axes)
            continue
        for axis in axes:
            held.tensor_map.add(dim=axis if isinstance(axis, list) else [axis])
        if len(axes) == 1:
            held.tensor_map.add()
    return found


def _get(raw: Any, name: str, default: Any) -> Any:
    """A field of the type of its default."""
    if not isinstance(raw, dict):
        raise TypeError(f"expected an object with {name}")
    value = raw.get(name, default)
    if type(value) is not type(default):
        raise TypeError(f"{name}: got {json.dumps(value)[:80]}")
    return value


def _json_of(content: Any) -> dict[str, Any]:
    return {
        "current_stage": content.current_stage,
        "parallel_strategy_item": {
            item.node_name: {
                "stage": item.parallel_strategys.stage,
                "parallel_strategy": [
                    list(axes.dim) for axes in item.parallel_strategys.parallel_strategy
                ],
            }
            for item in content.parallel_strategy_item
        },
        "parallel_layout_item": {
            item.param_name: _layout_json(item.parallel_layouts)
            for item in content.parallel_layout_item
        },
    }


def _layout_json(held: Any) -> dict[str, Any]:
    lists = {name: list(getattr(held, name)[0].dim) for name in _LISTS if getattr(held, name)}
    axes: list[Any] = [list(one) for one in _tensor_map(held)]
    if len(held.tensor_map) == 1:
        axes = list(held.tensor_map[0].dim)
    return {**lists, "tensor_map": axes, **{name: getattr(held, name) for name in _NUMBERS}}
