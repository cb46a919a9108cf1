"""manifest.json: description of an exported model, validated on reading.

A folder is an artifact if it holds a manifest and every file that it lists, with matching sha256.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from lite_runner.architectures.serialize import StoredDecoder, decoder_of, serialize
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import MANIFEST as MANIFEST
from lite_runner.errors import ArtifactError
from lite_runner.records import Range, dataclass
from lite_runner.system.user_cache import digest_of
from lite_runner.weights import manifest_file
from lite_runner.weights.manifest_file import FileName, FilePath, Sha256, write_manifest

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
        """The files of all ranks."""
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
