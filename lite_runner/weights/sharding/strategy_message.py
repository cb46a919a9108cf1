"""The two forms of MindSpore's strategy files, a protobuf message or JSON, as one message.

A name that ends in .json is JSON, any other the message `ParallelStrategyMap`, as
mindspore/parallel/_parallel_serialization.py (2.10) tells them apart.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write
from lite_runner.system.json_file import parse_json
from lite_runner.system.protobuf import parse_message

HINT = "give src_strategy_path_or_dir= the ckpt_strategy_rank_N.ckpt that the training wrote"

# The fields that are read or written, by number: name, kind, label. Every list of numbers is the
# same message on the wire, whatever MindSpore calls it.
_NUMBER, _TEXT = "int64", "string"
_MESSAGES: dict[str, dict[int, tuple[str, str, str]]] = {
    "Numbers": {1: ("dim", _NUMBER, "repeated")},
    "ParallelStrategys": {
        1: ("stage", _NUMBER, "required"),
        2: ("parallel_strategy", "Numbers", "repeated"),
    },
    "ParallelStrategyItem": {
        1: ("node_name", _TEXT, "required"),
        2: ("parallel_strategys", "ParallelStrategys", "required"),
    },
    "ParallelLayouts": {
        1: ("dev_matrix", "Numbers", "repeated"),
        2: ("tensor_map", "Numbers", "repeated"),
        3: ("param_split_shape", "Numbers", "repeated"),
        4: ("indices_offset", "Numbers", "repeated"),
        5: ("field", _NUMBER, "required"),
        6: ("opt_weight_shard_step", _NUMBER, "required"),
        7: ("opt_weight_shard_size", _NUMBER, "required"),
    },
    "ParallelLayoutItem": {
        1: ("param_name", _TEXT, "required"),
        2: ("parallel_layouts", "ParallelLayouts", "required"),
    },
    "ParallelStrategyMap": {
        1: ("current_stage", _NUMBER, "required"),
        2: ("parallel_strategy_item", "ParallelStrategyItem", "repeated"),
        3: ("parallel_layout_item", "ParallelLayoutItem", "repeated"),
    },
}
_LISTS = ("dev_matrix", "param_split_shape", "indices_offset")  # of a layout, one each
_NUMBERS = ("field", "opt_weight_shard_step", "opt_weight_shard_size")


def read(file: Path) -> Any:
    """The message in a file, with at least one layout. Raises ArtifactError."""
    content = file.read_bytes()
    try:
        found = _of_json(parse_json(content)) if file.suffix == ".json" else _of_bytes(content)
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{file}: not a strategy file: {error}", HINT) from error
    if not found.IsInitialized() or not found.parallel_layout_item:
        raise ArtifactError(f"{file}: not a strategy file: it holds no layout", HINT)
    return found


def write(file: Path, content: Any) -> None:
    """Write a message in the form that the name of the file says."""
    with atomic_write(file) as target:
        if file.suffix == ".json":
            target.write(json.dumps(_json_of(content)).encode())
        else:
            target.write(content.SerializeToString())


def tensor_map(held: Any) -> list[tuple[int, ...]]:
    """The axes of the device matrix for each axis of a tensor; -1 is none.

    One list has an axis of the matrix for each axis of the tensor. Several have a list for each,
    and MindSpore's C++ puts an empty one behind a single such list, to tell it from the first form.
    """
    lists = [tuple(one.dim) for one in held.tensor_map]
    if len(lists) == 1:
        return [(axis,) for axis in lists[0]]
    return [axes for axes in lists if axes]


def shards_optimizer(held: Any) -> bool:
    """Whether a layout is cut further, for the optimizer; a size alone says nothing."""
    return bool(held.opt_weight_shard_size and held.opt_weight_shard_step)


def _of_bytes(content: bytes) -> Any:
    return parse_message(_classes()["ParallelStrategyMap"], content)


def _of_json(raw: Any) -> Any:
    """Raises ValueError and TypeError for what is another JSON."""
    found = new("ParallelStrategyMap", current_stage=_get(raw, "current_stage", 0))
    for name, item in _get(raw, "parallel_strategy_item", {}).items():
        operator = found.parallel_strategy_item.add(node_name=name).parallel_strategys
        operator.stage = _get(item, "stage", 0)
        for axes in _get(item, "parallel_strategy", []):
            if isinstance(axes, list) and all(isinstance(axis, int) for axis in axes):
                operator.parallel_strategy.add(dim=axes)  # nested ones have no place in a message
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
    axes: list[Any] = [list(one) for one in tensor_map(held)]
    if len(held.tensor_map) == 1:
        axes = list(held.tensor_map[0].dim)
    return {**lists, "tensor_map": axes, **{name: getattr(held, name) for name in _NUMBERS}}


def new(name: str, **fields: Any) -> Any:
    """An empty message of one of `_MESSAGES`."""
    return _classes()[name](**fields)


@functools.cache
def _classes() -> dict[str, Any]:
    """The messages, in a pool of their own: MindSpore has the same names in the shared one."""
    kinds = descriptor_pb2.FieldDescriptorProto
    package = "mindspore.straspb"
    file = descriptor_pb2.FileDescriptorProto(
        name="node_strategy.proto", package=package, syntax="proto2"
    )
    for name, fields in _MESSAGES.items():
        held = file.message_type.add(name=name)
        for number, (field, kind, label) in fields.items():
            plain = kind in (_NUMBER, _TEXT)
            held.field.add(
                name=field,
                number=number,
                label=getattr(kinds, f"LABEL_{label.upper()}"),
                type=getattr(kinds, f"TYPE_{kind.upper()}" if plain else "TYPE_MESSAGE"),
                type_name=None if plain else f".{package}.{kind}",
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in _MESSAGES
    }
