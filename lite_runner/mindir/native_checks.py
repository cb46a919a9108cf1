"""Validates a graph file of the native kernels against its manifest, before they see a byte of it.

The kernels take what MindSpore hands them as it is: a graph that gives one layer for another, or
declares another shape, would make them read and write beyond it, and so would a damaged layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mindspore.train.mind_ir_pb2 import TensorProto
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Manifest
from lite_runner.native.kv_cache import cache_shapes
from lite_runner.native.validation import check_layer, check_model
from lite_runner.networks.native import head_operator

AGAIN = "export the model again"
_LAYER = "layer"  # a Parameter's name is this and its number
_DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.INT32: "int32",
}
_FORWARDING = ("Load", "Depend")  # their output is their first input
_ORDERING = ("UpdateState", "MakeTuple")  # their output orders the others, and has no values


def check_graph(path: Path, model: Any, manifest: Manifest) -> None:
    """Raise ArtifactError unless `model`, the ModelProto of a file, has the inputs, Parameters,
    calls and output of a NativeStep of the manifest's sizes; the length of layers is free."""
    check_model(f"{path}: the manifest's model", manifest.model)
    try:
        _Graph(model, manifest).check()
    except KeyError as error:
        raise ArtifactError(f"{path}: it has {error}, which no step has", AGAIN) from error
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}", AGAIN) from error


def check_parameter(path: Path, name: str, values: NDArray[Any], manifest: Manifest) -> None:
    """Raise ArtifactError unless a Parameter's values are what the kernels may be given: those of a
    layer are validated, any others may be anything."""
    assert manifest.operators is not None
    if name.startswith(_LAYER):
        check_layer(
            f"{path}: {name}",
            int(name.removeprefix(_LAYER)),
            values,
            manifest.model,
            rounded_input=manifest.operators.rounded_input,
        )


class _Shape(NamedTuple):
    dims: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.dims)}"


class _Value(NamedTuple):
    """An input, a Parameter, or the output of an operator."""

    name: str
    shape: _Shape


class _Graph:
    """A graph that is held against a manifest; ValueError or KeyError where it differs."""

    def __init__(self, model: Any, manifest: Manifest) -> None:
        self._model, self._graph, self._manifest = model, model.graph, manifest
        self._values: dict[str, _Value] = {}  # by the file's own names, each of which is one value

    def check(self) -> None:
        _equal("functions", len(self._model.functions), 0)
        self._check_inputs()
        self._check_parameters()
        self._check_nodes()

    def _check_inputs(self) -> None:
        expected = self._manifest.graphs["model"].inputs
        _equal("number of inputs", len(self._graph.input), len(expected))
        for one, wanted in zip(self._graph.input, expected, strict=True):
            (tensor,) = one.tensor
            shape = _shape_of(tensor)
            _equal(f"input {wanted.name}", shape, _Shape(wanted.shape, wanted.dtype))
            self._add(one.name, _Value(wanted.name, shape))

    def _check_parameters(self) -> None:
        manifest, model = self._manifest, self._manifest.model
        assert manifest.operators is not None
        if model.learned_positions and manifest.seq_length > model.seq_length:
            raise ValueError(f"seq_length {manifest.seq_length} of {model.seq_length} positions")
        slots, length = manifest.batch_size, manifest.seq_length
        cache = cache_shapes(model, slots, length, manifest.operators.kv_cache)
        expected = {
            f"{name}{index}": _Shape(dims, np.dtype(dtype).name)
            for name, (dims, dtype) in cache.items()
            for index in range(model.num_layers)
        }
        layers = {f"{_LAYER}{index}" for index in range(2 * model.num_layers + 2)}
        for one in self._graph.parameter:
            name, shape = one.name.rpartition(":")[2], _shape_of(one)
            if name in layers:
                layers.remove(name)
                _equal(name, shape, _Shape(shape.dims[:1], "uint8"))
            elif name in expected:
                _equal(name, shape, expected.pop(name))
            else:
                raise ValueError(f"{name}: its parameters are not those of the manifest's model")
            _equal(f"reference to {name}", one.ref_key, name)
            self._add(one.name, _Value(name, shape))
        if missing := sorted(layers | expected.keys()):
            raise ValueError(f"{missing[0]}: missing among its parameters")

    def _check_nodes(self) -> None:
        """The calls of the operators, in which a node's inputs come before it."""
        kinds = {one.name: one for one in self._model.primitives}
        _equal("names of primitives", len(kinds), len(self._model.primitives))
        expected = self._expected_calls()
        for node in self._graph.node:
            (output,) = node.output
            primitive = kinds.get(node.op_type.removeprefix("REF::"))
            kind = node.op_type if primitive is None else primitive.op_type
            if kind in _FORWARDING:
                value = self._values[node.input[0]]
                _equal(f"{value.name} in a node", _declared(node), value.shape)
                self._add(output, value)
            elif kind == "Custom" and primitive is not None and expected:
                name, inputs, shape = expected.pop(0)
                _equal("operator", _operator(primitive.attribute), name)
                given = [self._values[one].name for one in node.input]
                _equal(f"inputs of {name}", given, inputs)
                _equal(f"output of {name}", _declared(node), shape)
                self._add(output, _Value(f"output of {name}", shape))
            elif kind not in (*_ORDERING, "Constant"):
                raise ValueError(f"its node {node.name} is a {kind}, which is not expected there")
        _equal("operators that it does not call", [name for name, _, _ in expected], [])
        (result,) = self._graph.output
        logits = self._values[result.name]
        _equal("output", logits.name, f"output of {head_operator(self._manifest.model)}")
        (tensor,) = result.tensor
        _equal("output", _shape_of(tensor), logits.shape)

    def _expected_calls(self) -> list[tuple[str, list[str], _Shape]]:
        """Of each call: the operator, the names of its inputs, the shape of its output."""
        manifest, model = self._manifest, self._manifest.model
        assert manifest.operators is not None
        step, rope, adapter_slots = (one.name for one in manifest.graphs["model"].inputs)
        packed = []
        for index in range(model.num_layers):
            packed += [f"{_LAYER}{2 * index + 1}", f"keys{index}", f"values{index}"]
            packed += [f"key_scales{index}", f"value_scales{index}", f"{_LAYER}{2 * index + 2}"]
        first, last = f"{_LAYER}0", f"{_LAYER}{2 * model.num_layers + 1}"
        embedded, computed = "output of Embedding", "output of Layers"
        hidden = _Shape((manifest.operators.capacity, model.hidden_size), "float32")
        logits = _Shape((manifest.batch_size, model.vocab_size), "float32")
        return [
            ("Embedding", [step, adapter_slots, first], hidden),
            ("Layers", [embedded, step, rope, adapter_slots, *packed], hidden),
            (head_operator(model), [computed, step, adapter_slots, last, first], logits),
        ]

    def _add(self, name: str, value: _Value) -> None:
        if name in self._values:
            raise ValueError(f"two values are called {name}")
        self._values[name] = value


def _declared(node: Any) -> _Shape:
    """The shape that a node gives its output, a tensor."""
    (shape,) = (one for one in node.attribute if one.name == "shape")
    (tensor,) = shape.tensors
    return _shape_of(tensor)


def _shape_of(tensor: Any) -> _Shape:
    return _Shape(tuple(tensor.dims), _DTYPES[tensor.data_type])


def _operator(attributes: Iterable[Any]) -> str:
    """The operator of a primitive, which mindir.operators has resolved."""
    (found,) = (one.s for one in attributes if one.name == "func_name")
    name: str = found.decode().rpartition(":")[2]
    return name


def _equal(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise ValueError(f"{what}: got {got}, expected {expected}")
