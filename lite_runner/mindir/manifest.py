"""manifest.json: description of an exported model as plain JSON types, validated on reading.

A folder is an artifact if it holds a manifest and every file that it lists, with matching sha256.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from lite_runner.architectures import KNOWN, custom_network
from lite_runner.architectures.fields import MAX_EXPERTS, MAX_LAYERS, MAX_SIZE
from lite_runner.architectures.spec import Block, Decoder
from lite_runner.config.sections import MANIFEST as MANIFEST
from lite_runner.errors import ArtifactError
from lite_runner.records import Range, dataclass
from lite_runner.system.user_cache import digest_of
from lite_runner.weights import manifest_file
from lite_runner.weights.manifest_file import FileName, FilePath, Sha256, write_manifest


@dataclass(frozen=True)
class EqualBlocks(Block):
    """A run of equal blocks."""

    layers: int = dataclasses.field(kw_only=True)


@dataclass(frozen=True)
class StoredDecoder(Decoder):
    """The type of a serialized description, for the reader of typed dataclasses."""

    blocks: tuple[EqualBlocks, ...]


def serialize(model: Decoder) -> dict[str, Any]:
    """The description; runs of equal blocks are stored once, with their count."""
    plain = dataclasses.asdict(dataclasses.replace(model, blocks=()))
    plain["blocks"] = [
        {"layers": len(list(same)), **dataclasses.asdict(block)}
        for block, same in groupby(model.blocks)
    ]
    return plain


def decoder_of(stored: StoredDecoder) -> Decoder:
    """The decoder of a description whose types are right.

    Raises ValueError for numbers that no model has, or that contradict each other.
    """
    given = {field.name: getattr(stored, field.name) for field in dataclasses.fields(stored)}
    _check_layers(min((one.layers for one in stored.blocks), default=0))
    _check_layers(sum(one.layers for one in stored.blocks))
    given["blocks"] = tuple(block for one in stored.blocks for block in [_block(one)] * one.layers)
    model = Decoder(**given)
    if errors := list(_errors(model)):
        raise ValueError("; ".join(errors))
    return model


def _block(stored: EqualBlocks) -> Block:
    fields = dataclasses.fields(Block)
    return Block(**{field.name: getattr(stored, field.name) for field in fields})


def _check_layers(layers: int) -> None:
    if not 1 <= layers <= MAX_LAYERS:
        raise ValueError(f"model: {layers} layers, expected 1 to {MAX_LAYERS}")


def _errors(model: Decoder) -> Iterator[str]:
    attention, sizes = model.attention, model.sizes()
    if model.architecture not in KNOWN:
        known = ", ".join(KNOWN)
        yield (
            f"model: architecture {model.architecture!r} is not known here, expected {known}, or "
            "one that plugins= registers"
        )
        return
    for name in ("vocab_size", "hidden_size", "seq_length", "num_heads", "n_kv_heads", "head_dim"):
        if not 1 <= sizes[name] <= MAX_SIZE:
            yield f"model: {name} is {sizes[name]}, expected 1 to {MAX_SIZE:,}"
            return  # the others follow from it
    if custom_network(model) is not None:  # whatever else these mean to it
        return
    for block in dict.fromkeys(model.blocks):
        yield from _block_errors(block, model)
    for layer, block in enumerate(model.blocks):
        if block.attention.borrowed is not None:
            yield from _lender_errors(model, layer, block.attention.borrowed)
    if model.side is not None and not 1 <= model.side.width <= MAX_SIZE:
        yield f"model: side.width is {model.side.width}, expected 1 to {MAX_SIZE:,}"
    norms = (model.norm, model.embedding_norm, attention.qk_norm)
    if any(norm is not None and not 0 < norm.eps < 1 for norm in norms):
        yield "model: eps of a norm is not between 0 and 1"
    if not 0 <= model.position_offset <= MAX_SIZE:
        yield f"model: position_offset is {model.position_offset}, expected 0 to {MAX_SIZE:,}"
    tokens = (*model.eos_token_id, model.bos_token_id, model.pad_token_id)
    if model.prefix is not None:
        tokens += (model.prefix.end_token_id, *model.prefix.mask_token_ids)
    if any(token is not None and not -1 <= token <= MAX_SIZE for token in tokens):
        yield f"model: a special token is not from -1 to {MAX_SIZE:,}"


def _lender_errors(model: Decoder, layer: int, borrowed: int) -> Iterator[str]:
    """Validation errors of a layer that borrows an earlier one's keys."""
    own = model.blocks[layer].attention
    lender = model.blocks[borrowed] if 0 <= borrowed < layer else None
    if lender is None or not lender.attends or lender.attention.borrowed is not None:
        yield f"model: layer {layer} shares the keys of layer {borrowed}, which has none to share"
    elif (lender.attention.kv_heads, lender.attention.head_dim) != (own.kv_heads, own.head_dim):
        yield f"model: layer {layer} shares the keys of layer {borrowed}, whose heads differ"


def _block_errors(block: Block, model: Decoder) -> Iterator[str]:
    one = block.attention
    if not all(1 <= size <= MAX_SIZE for size in (one.heads, one.kv_heads, one.head_dim)):
        yield (
            f"model: heads, key/value heads and head_dim of a layer are {one.heads},"
            f" {one.kv_heads} and {one.head_dim}, expected 1 to {MAX_SIZE:,}"
        )
    elif one.heads % one.kv_heads:
        yield f"model: {one.kv_heads} key/value heads do not divide {one.heads} heads of a layer"
    if one.rotary is not None and one.head_dim % 2:
        yield f"model: head_dim is {one.head_dim}, expected an even number with RoPE"
    if not 1 <= block.feed_forward.width <= MAX_SIZE:
        yield f"model: feed_forward.width is {block.feed_forward.width}, expected 1 to {MAX_SIZE:,}"
    experts = block.feed_forward.experts
    if experts is not None:
        if not 1 <= experts.count <= MAX_EXPERTS:
            yield f"model: {experts.count} experts, expected 1 to {MAX_EXPERTS:,}"
        if not 1 <= experts.chosen <= experts.count:
            yield f"model: {experts.chosen} experts per token, expected 1 to {experts.count}"
        if not 0 <= experts.shared <= MAX_SIZE:
            yield f"model: experts.shared is {experts.shared}, expected 0 to {MAX_SIZE:,}"
        if not 1 <= experts.chosen_groups <= experts.groups or experts.count % experts.groups:
            yield (
                f"model: {experts.chosen_groups} of {experts.groups} groups of {experts.count}"
                " experts, expected a number of groups that divides them, and at most as many"
                " chosen"
            )
        elif not 1 <= experts.best_of_group <= experts.count // experts.groups or (
            experts.chosen > experts.count // experts.groups * experts.chosen_groups
        ):
            yield f"model: groups of experts are too small for {experts.chosen} experts per token"
    if one.window is not None and one.window < 1:
        yield f"model: window is {one.window}, expected at least 1"
    if one.clip is not None and not 0 < one.clip <= MAX_SIZE:
        yield f"model: clip is {one.clip}, expected a number above 0"
    norms = (block.norm, block.post_norm, block.sum_norm, block.out_norm)
    for norm in norms:
        if norm is not None and not 0 < norm.eps < 1:
            yield f"model: eps of a norm is {norm.eps}, expected a number between 0 and 1"
    kept = block.normed_residual
    if kept is not None and not 0 < kept <= MAX_SIZE:
        yield f"model: normed_residual is {kept}, expected a number above 0"
    if not any(norms):
        yield "model: a block has no norm"
    if one.rotary is not None:
        scaling = one.rotary.scaling
        dims = one.rotary.dims
        if dims is not None and (dims % 2 or not 2 <= dims <= one.head_dim):
            yield f"model: {dims} rotated dimensions, expected 2, 4, ... of {one.head_dim}"
        if one.rotary.theta <= 0:
            yield f"model: theta is {one.rotary.theta}, expected a number above 0"
        if scaling is not None and (scaling.factor <= 0 or scaling.original_seq_length < 1):
            yield (
                f"model: the scaling of RoPE is by {scaling.factor}, from "
                f"{scaling.original_seq_length} positions"
            )


SCHEMA = 1
MAX_BYTES = 1 << 20
MAX_ROWS = 1 << 16
MAX_LENGTH = 1 << 24  # positions of a row
AGAIN = "export the model again"

# full: a graph of whole sequences, without a cache; no_cache: one that MindFormers wrote with a
# MindSpore whose MindIR this one does not run.
Layout = Literal["resizable", "static_pair", "full", "no_cache"]
GraphName = Literal["model", "prefill", "increment"]
DTypeName = Literal["float32", "float16", "bfloat16", "int32", "int64", "bool"]


def fits_any(layout: Layout) -> bool:
    """True if an export of this layout takes any number of rows and positions."""
    return layout == "resizable"


def is_pair(layout: Layout) -> bool:
    """True if an export of this layout is two graphs that share a cache of their own."""
    return layout == "static_pair"


def keeps_cache(layout: Layout) -> bool:
    """True if an export of this layout keeps keys and values between its runs."""
    return layout not in ("full", "no_cache")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph; -1 in a shape is a dynamic axis."""

    name: str
    shape: tuple[Annotated[int, Range(-1)], ...]
    dtype: str  # NumPy's name, of DTypeName in a manifest


@dataclass(frozen=True)
class Graph:
    """One graph of an artifact."""

    file: FilePath  # below the manifest's folder; of a model above 1 GB the .._graph.mindir
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    others: tuple[FilePath, ...] = ()  # files of the further ranks that share the model

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file, *self.others)


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The fields of a manifest, without the model."""

    layout: Layout
    model_name: str
    source: str  # the checkpoint, as the config named it
    target: Literal["CPU", "Ascend"]
    model_type: Literal["MINDIR", "MINDIR_LITE"]
    precision: Literal["float32", "float16", "bfloat16"]  # of the weights
    batch_size: Annotated[int, Range(1, MAX_ROWS)]
    # Maximum positions of a row, prompt and new tokens together.
    seq_length: Annotated[int, Range(1, MAX_LENGTH)]
    graphs: Mapping[GraphName, Graph]
    files: Mapping[FilePath, Sha256]  # every file of the artifact, and its sha256
    tokenizer: tuple[FileName, ...]  # the tokenizer's among the files
    versions: Mapping[str, str]
    encrypted: bool = False
    sampled: bool = False  # the graphs return the argmax token, not logits
    adapter: str = ""  # name of the LoRA adapter that is merged into the weights
    adapter_sha256: Literal[""] | Sha256 = ""  # of its config and weights

    @property
    def fits_any(self) -> bool:
        """True if it takes any number of rows and positions."""
        return fits_any(self.layout)

    @property
    def ranks(self) -> int:
        """Ranks that share the model, each with graphs of its own."""
        return len(next(iter(self.graphs.values())).files)

    def paths(self, folder: Path, rank: int = 0) -> dict[GraphName, Path]:
        return {name: folder / graph.files[rank] for name, graph in self.graphs.items()}


@dataclass(frozen=True, kw_only=True)
class _Stored(_Description):
    model: StoredDecoder


@dataclass(frozen=True, kw_only=True)
class Manifest(_Description):
    """An exported model: source, layout, graphs and files."""

    model: Decoder

    def write(self, folder: Path) -> None:
        """Write manifest.json into a folder that holds all the files."""
        plain = {"schema": SCHEMA, **dataclasses.asdict(self), "model": serialize(self.model)}
        write_manifest(folder / MANIFEST, plain)


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of an artifact, its files compared with it.

    Raises ArtifactError where it is missing, broken or edited, or a file is missing or another one.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ArtifactError(f"{folder}: no {MANIFEST}")
    what = f"a manifest of this version (schema {SCHEMA})"
    stored = manifest_file.read_manifest(
        path, _Stored, what, schema=SCHEMA, most=MAX_BYTES, hint=AGAIN
    )
    try:
        given = {field.name: getattr(stored, field.name) for field in dataclasses.fields(stored)}
        manifest = Manifest(**{**given, "model": decoder_of(stored.model)})
        _check_consistent(manifest)
        _check_inside(manifest, folder)
    except ValueError as error:
        raise ArtifactError(f"{path}: {error}", AGAIN) from error
    if check_files:
        for name, expected in manifest.files.items():
            _check_file(folder / name, expected)
    return manifest


def _check_consistent(manifest: Manifest) -> None:
    """Raise ValueError where the numbers of a manifest contradict each other."""
    graphs = manifest.graphs
    expected = {"prefill", "increment"} if is_pair(manifest.layout) else {"model"}
    if graphs.keys() != expected:
        raise ValueError(
            f"graphs {', '.join(sorted(graphs))}, expected {', '.join(sorted(expected))} with "
            f"layout {manifest.layout}"
        )
    if len({len(graph.files) for graph in graphs.values()}) != 1:
        raise ValueError("its graphs are of different numbers of ranks")
    if manifest.seq_length > manifest.model.seq_length:
        raise ValueError(
            f"seq_length {manifest.seq_length}, but the model supports at most "
            f"{manifest.model.seq_length}"
        )
    for graph in graphs.values():
        for one in (*graph.inputs, *graph.outputs):
            if one.dtype not in get_args(DTypeName):
                raise ValueError(f"{one.name} is of the type {one.dtype!r}, which no graph has")
        logits = graph.outputs[0] if graph.outputs and not manifest.sampled else None
        if logits and logits.shape[-1:] != (manifest.model.vocab_size,):
            raise ValueError(
                f"logits {list(logits.shape)} of a model with a vocabulary of "
                f"{manifest.model.vocab_size}"
            )


def _check_inside(manifest: Manifest, folder: Path) -> None:
    """Raise ValueError for the name of a file that is not listed, or a link out of the folder."""
    graphs = (file for graph in manifest.graphs.values() for file in graph.files)
    for name in (*graphs, *manifest.tokenizer):
        if name not in manifest.files:
            raise ValueError(f"names the file {name!r}, which is not the artifact's")
    for name in manifest.files:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"names the file {name!r}, which is not the artifact's")


def _check_file(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: missing, but the manifest names it", AGAIN)
    found = digest_of(path)
    if found != expected:
        raise ArtifactError(
            f"{path}: another file than the one exported: sha256 {found[:16]}..., "
            f"expected {expected[:16]}...",
            AGAIN,
        )
