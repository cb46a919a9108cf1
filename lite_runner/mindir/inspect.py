"""Inspects a MindIR without a manifest: recognizes its layout, compares it with a description.

Our and MindFormers' parameter names are recognized, with any prefix; others are ignored.
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

from lite_runner.architectures import Architecture, architecture_of, custom_network
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.mindir.graph_inputs import (
    COMMON,
    IDS,
    LLAMA,
    MAPPING,
    InputsOfInfer,
    dynamic_inputs,
    inputs_style,
    specs_of,
)
from lite_runner.mindir.manifest import (
    MANIFEST,
    Graph,
    GraphName,
    Layout,
    Manifest,
    TensorSpec,
    is_pair,
)
from lite_runner.mindir.skim import read_model
from lite_runner.records import dataclass
from lite_runner.weights.layouts import expected_tensors

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
    producer: str  # version of the MindSpore that wrote it


def read_graph(path: Path) -> GraphInfo:
    """The contents of a MindIR; its weights stay on disk.

    Raises ArtifactError if the file is missing, encrypted, no MindIR, or of an unknown version.
    """
    model = read_model(path)
    inputs = tuple(_specs(model.graph.input))
    if not inputs:
        raise ArtifactError(f"{path}: not a MindIR, or one without inputs")
    return GraphInfo(
        path,
        inputs,
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
    """A manifest for graphs without one: a pair, or one graph as {"model": path}. A model whose
    graphs have more positions is taken with theirs.

    Raises ArtifactError if the inputs match no known layout, or the graphs do not belong together
    or to `model`.
    """
    graphs = {name: read_graph(path) for name, path in paths.items()}
    inputs: dict[GraphName, tuple[TensorSpec, ...]]  # with the backends' names
    if "model" in graphs:
        layout, batch, length, single = _single(graphs["model"], model)
        inputs = {"model": single}
        rows = {"full": batch, "no_cache": batch}.get(layout)
        sampled = {rows is not None and _samples(graphs["model"], rows, model)}
    else:
        layout = "static_pair"
        style, batch, length = _pair(graphs["prefill"], graphs["increment"], model, model_name)
        inputs = {
            name: _with_shapes(specs_of(style, name, batch, length), graph)
            for name, graph in graphs.items()
        }
        sampled = {_samples(graph, batch, model) for graph in graphs.values()}
    if length > model.seq_length:
        model = dataclasses.replace(model, seq_length=length)
    first = next(iter(graphs.values()))
    if len(sampled) > 1:
        raise ArtifactError(
            f"{first.path}: one graph of the pair returns tokens, the other logits",
            "give two graphs of one export",
        )
    for graph in graphs.values():
        cache_rows = batch * length if is_pair(layout) else None
        errors = mismatches(model, graph.parameters, cache_rows=cache_rows)
        if errors:
            raise ArtifactError(
                f"{graph.path}: not a graph of {model_name}: {'; '.join(errors)}",
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
    rows = None if manifest.fits_any else batch
    caches = is_pair(manifest.layout)
    for name, path in paths.items():
        graph, errors = read_graph(path), []
        if not _matches(graph.inputs, wanted := manifest.graphs[name].inputs):
            errors.append(f"it takes {_texts(graph.inputs)}, expected {_texts(wanted)}")
        if known:
            cache_rows = batch * length if caches else None
            errors += mismatches(model, graph.parameters, cache_rows=cache_rows)
        if not errors and known and rows and _samples(graph, rows, model) != manifest.sampled:
            errors.append("it returns " + ("logits" if manifest.sampled else "tokens"))
        if errors:
            raise ArtifactError(
                f"{path}: not the graph that {MANIFEST} describes: {'; '.join(errors)}",
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
    weight = _feed_forward(architecture_of(model))
    named = any(one.name.endswith(weight) for one in prefill.parameters)
    common = COMMON in found and named
    if own not in found and not common and all(style in ours for style in found):
        names = ", ".join(spec.name for spec in prefill.inputs)
        raise ArtifactError(
            f"{prefill.path}: its inputs ({names}) are not those of {model_name}, which "
            f"is a {model.architecture}: ({', '.join(own.names)})",
            "name the model that was exported: model= or --config",
        )
    shapes = {one.name: one for one in prefill.parameters}
    for one in increment.parameters:
        if (there := shapes.get(one.name, one)) != one:
            raise ArtifactError(
                f"{increment.path}: {_text(one)}, but {_text(there)} in {prefill.path.name}: these "
                "graphs are from different exports",
                "export both graphs together",
            )
    return found[0], batch, length


def _with_shapes(specs: Sequence[TensorSpec], graph: GraphInfo) -> tuple[TensorSpec, ...]:
    """The specs in the graph's shapes, where [b] may be [b, 1]."""
    pairs = zip(specs, graph.inputs, strict=True)
    return tuple(dataclasses.replace(spec, shape=got.shape) for spec, got in pairs)


def _single(graph: GraphInfo, model: Decoder) -> tuple[Layout, int, int, tuple[TensorSpec, ...]]:
    """Layout, batch and sequence length of one graph, and its inputs with the names that the
    backends use. Raises ArtifactError."""
    wanted = dynamic_inputs(model)
    if _matches(graph.inputs, wanted):
        return "resizable", 1, model.seq_length, wanted
    batch, length = _ids_shape(graph)
    valid = batch >= 1 and 0 < batch * length <= MAX_POSITIONS
    for style in (*_styles(model), IDS) if valid else ():
        # An increment has the positions as its last input, of a size that only now is checked.
        positions = length if length > 1 else next(iter(graph.inputs[-1].shape), 0)
        if not 0 < batch * positions <= MAX_POSITIONS:
            continue
        role: GraphName = "prefill" if length > 1 else "increment"
        wanted = specs_of(style, role, batch, positions)
        if _matches(graph.inputs, wanted):
            if role == "prefill" and not has_cache(graph.parameters):
                # Graphs written by MindSpore 2.0 run only in MindSpore Lite 2.0.
                layout: Layout = "no_cache" if graph.mind_ir_version <= 1 else "full"
                return layout, batch, length, _with_shapes(wanted, graph)
            raise ArtifactError(
                f"{graph.path}: only one of a pair, its {role} graph",
                "give both: infer.prefill_model_path= and infer.increment_model_path=",
            )
    raise _no_layout((graph,), model, None)


def _samples(graph: GraphInfo, batch: int, model: Decoder) -> bool:
    """True if a graph returns the argmax token (int32) instead of logits.

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
    """True if inputs match `wanted` by order, type and shape, and no known name contradicts."""
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
    """The longest of the `known` names that is a suffix of this one."""
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
        expected = _texts(dynamic_inputs(model))
    else:
        both: tuple[GraphName, ...] = ("prefill", "increment")
        wanted = [specs_of(inputs_style(model), name, *sizes) for name in both]
        expected = f"of a {model.architecture} {_texts(wanted[0])}, then {_texts(wanted[1])}"
    return ArtifactError(
        f"{graphs[0].path}: unknown layout{found}\n  expected {expected}",
        "export the model again; lite_runner.register_inputs adds inputs for a pair",
    )


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


_EMBEDDING = re.compile(
    r"(?:^|\.)(?:tok_embeddings\.embedding_weight|word_embedding\.embedding_table"
    r"|embedding\.weight|table)$"
)
_LAYER = re.compile(r"(?:^|\.)(?:blocks|layers)\.(\d+)\.")
_CACHE = re.compile(r"(?:^|\.)(?:keys|values|key_past|value_past)$")
_VALUES = re.compile(r"(?:^|\.)(?:values|value_past)$")


def sizes_of(
    architecture: Architecture,
    parameters: Sequence[TensorSpec],
    constants: Iterable[tuple[int, ...]],
) -> dict[str, int]:
    """The sizes of a graph's model by their names in `model.model_config`.

    `constants`: integer tuples in the graph, some of which are shapes. Raises ArtifactError if the
    embedding, a layer or the number of heads cannot be identified.
    """
    shapes = {one.name: one.shape for one in parameters}
    tables = [shape for name, shape in shapes.items() if _EMBEDDING.search(name)]
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    wide = [shapes[name] for name in shapes if name.endswith(_feed_forward(architecture))]
    known = tables and layers and wide
    if not known or len(tables[0]) != 2 or min(tables[0]) < 1:
        raise ArtifactError(
            f"its sizes cannot be inferred, or it is not a {architecture.name}", _NAME_IT
        )
    vocab, hidden = tables[0]
    # head_dim: the last axis of the value cache, else of a reshape target [.., heads, head_dim].
    dims = {shape[-1] for name, shape in shapes.items() if shape and _VALUES.search(name)} or {
        one[3] for one in constants if len(one) == 4 and one[3] > 1 and one[2] * one[3] == hidden
    }
    if len(dims) != 1 or min(dims) < 1:
        raise ArtifactError("its number of heads cannot be inferred", _NAME_IT)
    head_dim = dims.pop()
    width = math.prod(wide[0]) // hidden
    # Key/value heads: from the rows of the key weight, if its name is known.
    key = (_suffix(architecture, "key", "weight"), ".wk.weight")  # MindFormers', ours
    keys = [math.prod(shape) for name, shape in shapes.items() if name.endswith(key)]
    sizes = {
        "head_dim": head_dim,
        "intermediate_size": width,
        "expand_ratio": width // hidden,
        **({"n_kv_heads": keys[0] // hidden // head_dim} if keys else {}),
    }
    assert architecture.mindformers is not None
    names = architecture.mindformers.sizes
    if not sizes.keys() >= {*names.values()}:
        raise ArtifactError("its number of key/value heads cannot be inferred", _NAME_IT)
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": max(layers) + 1,
        "num_heads": hidden // head_dim,
        **{theirs: sizes[ours] for theirs, ours in names.items()},
    }


_NAME_IT = "name the exported model, e.g. model_name=bloom_560m"


def has_cache(parameters: Iterable[TensorSpec]) -> bool:
    """True if a graph keeps keys and values between runs."""
    return any(_CACHE.search(one.name) for one in parameters)


def _feed_forward(architecture: Architecture) -> tuple[str, ...]:
    """Name suffixes of a layer's first feed-forward weight (the gate if gated); none of a custom
    network, whose names are unknown, and of a model that has experts alone."""
    if "up" not in architecture.names:
        return ()
    if "gate" in architecture.names:
        return (_suffix(architecture, "gate", "weight"), ".w1.weight")  # MindFormers', ours
    return (_suffix(architecture, "up", "weight"), ".up.weight")


def _suffix(architecture: Architecture, role: Role, kind: Part) -> str:
    return f".{architecture.names[role].mindformers.rpartition('.')[2]}.{kind}"


def mismatches(
    model: Decoder, parameters: Sequence[TensorSpec], *, cache_rows: int | None
) -> list[str]:
    """Mismatches of a graph's `parameters` and the model, "name: got .., expected .."; at most 5.

    `cache_rows`: rows times positions of the graph's cache; None without one.
    """
    errors = (
        f"{name}: got {got}, expected {expected}"
        for name, got, expected in _comparisons(model, parameters, cache_rows)
        if got != expected
    )
    return list(dict.fromkeys(errors))[:5]


def _comparisons(
    model: Decoder, parameters: Sequence[TensorSpec], cache_rows: int | None
) -> Iterator[tuple[str, object, object]]:
    shapes = {one.name: tuple(size for size in one.shape if size != 1) for one in parameters}
    layers = {int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    if layers:
        yield "num_layers", max(layers) + 1, model.num_layers
    wide = model.intermediate_size * model.hidden_size
    architecture = architecture_of(model)
    feed_forward = _feed_forward(architecture)
    for name, shape in shapes.items():
        size = math.prod(shape)
        if _EMBEDDING.search(name) and len(shape) == 2:
            yield "vocab_size", shape[0], model.vocab_size
            yield "hidden_size", shape[1], model.hidden_size
        elif name.endswith(feed_forward):
            yield "elements of a feed-forward weight", size, wide
        elif _CACHE.search(name) and cache_rows is not None:
            expected = cache_rows * model.n_kv_heads * model.head_dim
            yield "elements of a layer's cache", size, expected
    if architecture.names:
        query = _suffix(architecture, "query", "weight")
        if any(name.endswith(query) for name in shapes):
            bias = _suffix(architecture, "query", "bias")
            biased = any(name.endswith(bias) for name in shapes)
            yield "qkv_has_bias", biased, model.attention.qkv_bias
    canonical = expected_tensors(model)
    most = 1 + max((name.count(".") for name in canonical), default=0)
    for name, shape in shapes.items():
        parts = name.rsplit(".", most)  # a file's name may have millions of dots
        for start in range(len(parts)):
            if (wanted := canonical.get(".".join(parts[start:]))) is not None:
                yield name, shape, tuple(size for size in wanted if size != 1)
                break
