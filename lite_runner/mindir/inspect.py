"""Inspects a MindIR without a manifest and recognizes its layout.

Shapes: b rows of a batch, s maximum positions per row, K key/value heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mindspore.train.mind_ir_pb2 import AttributeProto, TensorProto

from lite_runner.architectures import architecture_of, custom_network
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.mindir.dynamic_inputs import INPUTS as DYNAMIC
from lite_runner.mindir.graph_check import has_names_of, mismatches
from lite_runner.mindir.manifest import MANIFEST, Graph, GraphName, Layout, Manifest, TensorSpec
from lite_runner.mindir.pair_inputs import (
    COMMON,
    LLAMA,
    MAPPING,
    InputsOfInfer,
    inputs_style,
    specs_of,
)
from lite_runner.mindir.resizable_inputs import dynamic_inputs
from lite_runner.mindir.skim import read_model
from lite_runner.records import dataclass

# MindFormers' network input names that differ from its documentation.
_OTHER_NAMES = {"input_position": "current_index", "batch_valid_length": "valid_length"}
MAX_POSITIONS = 2**26  # rows times positions of a pair
_DTYPES = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.BOOL: "bool",
}


@dataclass(frozen=True)
class GraphInfo:
    """Contents of a graph file. Names are without MindSpore's prefix."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]  # may be missing if there are several
    parameters: tuple[TensorSpec, ...]
    constants: frozenset[tuple[int, ...]]  # integer tuples: target shapes of reshapes
    mind_ir_version: int
    producer: str  # the MindSpore that wrote it


def read_graph(path: Path) -> GraphInfo:
    """The contents of a MindIR; its weights stay on disk.

    Raises ArtifactError if the file is missing, encrypted, no MindIR, or of an unknown version.
    """
    model = read_model(path)
    return GraphInfo(
        path,
        tuple(_specs(model.graph.input)),
        tuple(_specs(model.graph.output)),
        tuple(_spec(one.name, one) for one in model.graph.parameter),
        frozenset(_tuples(model.graph.node)),
        model.mind_ir_version,
        model.model_version,
    )


def foreign_manifest(
    paths: Mapping[GraphName, Path],
    model: Decoder,
    model_name: str,
    *,
    target: Literal["CPU", "Ascend"] = "CPU",
) -> Manifest:
    """A manifest for graphs without one: a pair, or one graph as {"model": path}.

    Raises ArtifactError if the inputs match no known layout, or the graphs do not belong together
    or to `model`.
    """
    graphs = {name: read_graph(path) for name, path in paths.items()}
    inputs: dict[GraphName, tuple[TensorSpec, ...]]  # with the names that the backends use
    if "model" in graphs:
        layout, batch, length = _single(graphs["model"], model, model_name)
        inputs = {"model": _inputs_of(layout, graphs["model"], model)}
        rows = {"dynamic": 1, "no_cache": batch}.get(layout)
        sampled = {rows is not None and _samples(graphs["model"], rows, model)}
    else:
        layout = "static_pair"
        style, batch, length = _pair(graphs["prefill"], graphs["increment"], model, model_name)
        inputs = {
            name: tuple(
                dataclasses.replace(spec, shape=got.shape)  # [b] may be [b, 1]
                for spec, got in zip(
                    specs_of(style, name, batch, length), graph.inputs, strict=True
                )
            )
            for name, graph in graphs.items()
        }
        sampled = {_samples(graph, batch, model) for graph in graphs.values()}
    first = next(iter(graphs.values()))
    if len(sampled) > 1:
        raise ArtifactError(
            f"{first.path}: one graph of the pair returns tokens, the other logits",
            "give two graphs of one export",
        )
    for graph in graphs.values():
        cache_rows = batch * length if layout in ("dynamic", "static_pair") else None
        faults = mismatches(model, graph.parameters, cache_rows=cache_rows)
        if faults:
            raise ArtifactError(
                f"{graph.path}: not a graph of {model_name}: {'; '.join(faults)}",
                "name the model that was exported: model= or --config",
            )
    folder = first.path.parent
    floats = [one.dtype for one in first.parameters if one.dtype.endswith(("16", "32"))]
    return Manifest(
        layout=layout,
        model_name=model_name,
        model=model,
        source=str(first.path),
        target=target,
        model_type="MINDIR",
        precision="float16" if floats.count("float16") > len(floats) / 2 else "float32",
        batch_size=batch,
        seq_length=length,
        graphs={
            name: Graph(
                # Absolute if it is not inside the folder.
                graph.path.name if graph.path.parent == folder else str(graph.path.absolute()),
                inputs[name],
                graph.outputs,
            )
            for name, graph in graphs.items()
        },
        files={},
        tokenizer=(),
        versions={"mindspore": first.producer},
        sampled=sampled == {True},
    )


def check_graphs(paths: Mapping[GraphName, Path], manifest: Manifest) -> None:
    """Hold a manifest against the graphs themselves, which are not encrypted.

    Raises ArtifactError where inputs, parameters, KV cache or outputs have other shapes or types.
    Of shards, and of a custom network, only the inputs are known.
    """
    model, batch, length = manifest.model, manifest.batch_size, manifest.seq_length
    known = manifest.ranks == 1 and custom_network(model) is None
    rows = {"dynamic": 1, "no_cache": batch, "static_pair": batch}.get(manifest.layout)
    has_cache = manifest.layout in ("dynamic", "static_pair")
    for name, path in paths.items():
        graph, faults = read_graph(path), []
        if not _matches(graph.inputs, wanted := manifest.graphs[name].inputs):
            faults.append(f"it takes {_texts(graph.inputs)}, expected {_texts(wanted)}")
        if known:
            cache_rows = batch * length if has_cache else None
            faults += mismatches(model, graph.parameters, cache_rows=cache_rows)
        if not faults and known and manifest.layout == "dynamic":
            cache = _cache_of(graph, model, manifest.model_name)
            if cache != (batch, length):
                faults.append(f"KV cache [rows, positions]: got {cache}, expected {batch, length}")
        if not faults and known and rows and _samples(graph, rows, model) != manifest.sampled:
            faults.append("it returns " + ("logits" if manifest.sampled else "tokens"))
        if faults:
            raise ArtifactError(
                f"{path}: not the graph that {MANIFEST} describes: {'; '.join(faults)}",
                "copy the whole folder again, or export the model again",
            )


def _pair(
    prefill: GraphInfo, increment: GraphInfo, model: Decoder, model_name: str
) -> tuple[InputsOfInfer, int, int]:
    """Style, batch and sequence length of a matching pair. Raises ArtifactError."""
    batch, length = _ids_shape(prefill)
    other = _ids_shape(increment)
    if length == 1 and other[1] > 1:
        raise ArtifactError(
            f"the graphs are swapped: {prefill.path} takes 1 token per row (an increment graph), "
            f"{increment.path} takes {other[1]} (a prefill graph)",
            "give the prefill graph first",
        )
    valid = batch >= 1 and length >= 2 and batch * length <= MAX_POSITIONS
    styles = _styles(model) if valid else []
    found = [style for style in styles if _is_pair(prefill, increment, style, batch, length)]
    if not found:
        raise _no_layout((prefill, increment), model, (batch, length) if valid else (1, 1024))
    # Registered inputs may belong to any model.
    own, ours = inputs_style(model), (COMMON, LLAMA)
    # MindFormers 1.0.2 exports llama with the inputs of all its other models.
    named = has_names_of(architecture_of(model), prefill.parameters)
    common = COMMON in found and named
    if own not in found and not common and all(style in ours for style in found):
        raise ArtifactError(
            f"{prefill.path}: its inputs ({_names(prefill)}) are not those of {model_name}, which "
            f"is a {model.architecture}: ({', '.join(own.names)})",
            "name the model that was exported: model= or --config",
        )
    _check_length(prefill, length, model, model_name)
    shapes = {one.name: one for one in prefill.parameters}
    for one in increment.parameters:
        if (there := shapes.get(one.name, one)) != one:
            raise ArtifactError(
                f"{increment.path}: {_text(one)}, but {_text(there)} in {prefill.path.name}: these "
                "graphs are from different exports",
                "export both graphs together",
            )
    return found[0], batch, length


def _check_length(graph: GraphInfo, length: int, model: Decoder, model_name: str) -> None:
    if length > model.seq_length:
        raise ArtifactError(
            f"{graph.path}: exported for {length} positions per row, but {model_name} supports at "
            f"most {model.seq_length}"
        )


def _inputs_of(layout: Layout, graph: GraphInfo, model: Decoder) -> tuple[TensorSpec, ...]:
    """The inputs of a single graph, with the names that the backends use."""
    if layout == "no_cache":
        return (dataclasses.replace(graph.inputs[0], name="input_ids"),)
    return DYNAMIC if layout == "dynamic" else dynamic_inputs(model)


def _single(graph: GraphInfo, model: Decoder, model_name: str) -> tuple[Layout, int, int]:
    """Layout, batch and sequence length of one graph. Raises ArtifactError."""
    if _matches(graph.inputs, DYNAMIC):
        return "dynamic", *_cache_of(graph, model, model_name)
    wanted = dynamic_inputs(model)
    if _matches(graph.inputs, wanted):
        return "resizable", 1, model.seq_length
    batch, length = _ids_shape(graph)
    ids = TensorSpec("input_ids", (batch, length), "int32")
    if batch >= 1 and length > 1 and _matches(graph.inputs, [ids]):
        _check_length(graph, length, model, model_name)
        return "no_cache", batch, length
    for style in _styles(model) if batch >= 1 and 0 < batch * length <= MAX_POSITIONS else ():
        positions = length if length > 1 else graph.inputs[-1].shape[0]
        role: GraphName = "prefill" if length > 1 else "increment"
        if _matches(graph.inputs, specs_of(style, role, batch, positions)):
            raise ArtifactError(
                f"{graph.path}: only one of a pair, its {role} graph",
                "give both: infer.prefill_model_path= and infer.increment_model_path=",
            )
    raise _no_layout((graph,), model, None)


def _cache_of(graph: GraphInfo, model: Decoder, model_name: str) -> tuple[int, int]:
    """Slots and positions of a dynamic graph's cache, a Parameter [slots * K * s, D].

    The division of its rows follows from the shapes it is reshaped to: [slots, K * s * D] if there
    are several slots, then [K, s, D].
    """
    dim, kv = model.head_dim, model.n_kv_heads
    caches = [one for one in graph.parameters if one.name.endswith(".keys")]
    rows = math.prod(caches[0].shape) // (dim * kv) if caches else 0
    divided = {
        (rows // shape[1], shape[1])
        for shape in graph.constants
        if len(shape) == 3 and (shape[0], shape[2]) == (-1, dim) and shape[1] > 0 < rows
        if rows % shape[1] == 0
        if rows == shape[1] or (rows // shape[1], -1) in graph.constants
    }
    if len(divided) != 1:
        raise ArtifactError(
            f"{graph.path}: cannot infer the rows and length of its KV cache, assuming "
            f"{model_name} ({kv} key/value heads of {dim})",
            "name the model that was exported, or give the folder with its manifest.json",
        )
    return divided.pop()


def _samples(graph: GraphInfo, batch: int, model: Decoder) -> bool:
    """Whether a graph returns the argmax token (int32) instead of logits.

    MindFormers' graphs return a tuple whose other elements are passed through, and may have logits
    of every position. Unknown outputs count as logits. Raises ArtifactError.
    """
    sizes = [(one.dtype, one.shape, math.prod(one.shape)) for one in graph.outputs]
    logits = any(
        dtype.startswith("float") and shape[-1:] == (model.vocab_size,) and size % batch == 0
        for dtype, shape, size in sizes
    )
    tokens = any(
        dtype == "int32" and (size == batch or (size % batch == 0 and shape[-1] == 1))
        for dtype, shape, size in sizes
    )
    if logits or not graph.outputs:
        return False
    if tokens:
        return True
    output = graph.outputs[0]
    raise ArtifactError(
        f"{graph.path}: returns {output.dtype} {list(output.shape)}, expected logits "
        f"[{batch}, {model.vocab_size}] or, with greedy sampling, tokens int32 [{batch}]",
        "name the model that was exported: model= or --config",
    )


def _styles(model: Decoder) -> list[InputsOfInfer]:
    """Every known style, the model's own first."""
    return list(dict.fromkeys([inputs_style(model), *MAPPING.values()]))


def _is_pair(
    prefill: GraphInfo, increment: GraphInfo, style: InputsOfInfer, batch: int, length: int
) -> bool:
    first, second = (specs_of(style, name, batch, length) for name in ("prefill", "increment"))
    return _matches(prefill.inputs, first) and _matches(increment.inputs, second)


def _matches(found: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> bool:
    """Whether inputs match `wanted` by order, type and shape, and no name contradicts."""
    if len(found) != len(wanted):
        return False
    names = {spec.name for spec in wanted}
    for got, want in zip(found, wanted, strict=True):
        known = _known_suffix(got.name, {*names, *_OTHER_NAMES})
        if _OTHER_NAMES.get(str(known), known) not in (None, want.name) or got.dtype != want.dtype:
            return False
        shape = got.shape[:1] if len(want.shape) == 1 and got.shape[1:] == (1,) else got.shape
        if len(shape) != len(want.shape):
            return False
        if any(b not in (-1, a) for a, b in zip(shape, want.shape, strict=True)):
            return False
    return True


def _known_suffix(name: str, known: Iterable[str]) -> str | None:
    """The longest of the `known` names that this one ends in."""
    ends = [one for one in known if re.search(rf"(?:^|[^A-Za-z0-9]){re.escape(one)}$", name)]
    return max(ends, key=len, default=None)


def _ids_shape(graph: GraphInfo) -> tuple[int, int]:
    """[b, s] of the first input; (0, 0) if it is not 2-D."""
    shape = graph.inputs[0].shape
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def _no_layout(
    graphs: Sequence[GraphInfo], model: Decoder, sizes: tuple[int, int] | None
) -> ArtifactError:
    found = "".join(f"\n  {graph.path.name} takes {_texts(graph.inputs)}" for graph in graphs)
    if sizes is None:
        expected = f"{_texts(DYNAMIC)}, or {_texts(dynamic_inputs(model))}"
    else:
        both: tuple[GraphName, ...] = ("prefill", "increment")
        wanted = [specs_of(inputs_style(model), name, *sizes) for name in both]
        expected = f"of a {model.architecture} {_texts(wanted[0])}, then {_texts(wanted[1])}"
    return ArtifactError(
        f"{graphs[0].path}: unknown layout{found}\n  expected {expected}",
        "export the model again; lite_runner.register_inputs adds inputs for a pair",
    )


def _names(graph: GraphInfo) -> str:
    return ", ".join(spec.name for spec in graph.inputs)


def _texts(specs: Sequence[TensorSpec]) -> str:
    more = f", ... ({len(specs)} in all)" if len(specs) > 9 else ""
    return f"({', '.join(map(_text, specs[:9]))}{more})"


def _text(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"


def _specs(values: Iterable[Any]) -> Iterator[TensorSpec]:
    """The spec of each input or output; several outputs are in a tuple."""
    for value in values:
        for tensor in value.tensor:
            yield _spec(value.name, tensor)
        for entry in value.attr_info.values:
            for tensor in entry.tensors:
                yield _spec(value.name, tensor)


def _spec(name: str, tensor: Any) -> TensorSpec:
    dtype = _DTYPES.get(tensor.data_type, f"type {tensor.data_type}")
    return TensorSpec(name.rpartition(":")[2], tuple(tensor.dims), dtype)


def _tuples(nodes: Iterable[Any]) -> Iterator[tuple[int, ...]]:
    """The constants of a graph that are integer tuples."""
    for node in nodes:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            if attribute.type == AttributeProto.TUPLE and attribute.values:
                yield tuple(entry.ints[0] for entry in attribute.values if entry.ints)
