"""manifest.json: description of an exported model, validated on reading.

A folder is an artifact if it holds a manifest and every file that it lists, with matching sha256.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from lite_runner.architectures.plain import from_plain, to_plain
from lite_runner.architectures.spec import Decoder
from lite_runner.config.model_dir import MANIFEST as MANIFEST
from lite_runner.config.quantization import CacheType, Quant, Quantization
from lite_runner.errors import ArtifactError
from lite_runner.native.packing import FORMAT
from lite_runner.system.files import sha256_of
from lite_runner.system.json_file import read_json

SCHEMA = 1
MAX_BYTES = 1 << 20
MAX_CAPACITY = 1 << 16  # tokens of a step

Layout = Literal["resizable", "dynamic", "static_pair", "no_cache"]  # the last is not exported
GraphName = Literal["model", "prefill", "increment"]


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph; -1 in a shape is a dynamic axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's name: int32, int64, float32, float16, bool


@dataclass(frozen=True)
class Graph:
    """One graph of an artifact."""

    file: str  # below the manifest's folder; of a model above 1 GB the .._graph.mindir
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    others: tuple[str, ...] = ()  # files of the ranks behind the first that share the model

    @property
    def files(self) -> tuple[str, ...]:
        """Of all ranks."""
        return (self.file, *self.others)


@dataclass(frozen=True)
class Operators:
    """A graph of the native kernels, which are not part of the artifact."""

    format: int  # of the packed weights: the oldest that has their layers, which more can read
    quant: Quant
    quant_group: int  # columns of a group of 4 bits; 0 with 8 bits
    kv_cache: CacheType
    capacity: int  # tokens of a step

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.quant, self.quant_group)


@dataclass(frozen=True)
class Manifest:
    """An exported model: source, layout, graphs and files."""

    layout: Layout
    model_name: str
    model: Decoder
    source: str  # the checkpoint, as the config named it
    target: Literal["CPU", "Ascend"]
    model_type: Literal["MINDIR", "MINDIR_LITE"]
    precision: str  # of the weights: float32 or float16
    batch_size: int
    seq_length: int  # positions a row has at most, prompt and new tokens together
    graphs: Mapping[GraphName, Graph]
    files: Mapping[str, str]  # every file of the artifact, and its sha256
    tokenizer: tuple[str, ...]  # those of the files that are the tokenizer's
    versions: Mapping[str, str]
    encrypted: bool = False
    sampled: bool = False  # the graphs return the argmax token, not logits
    adapter: str = ""  # name of the LoRA adapter that is merged into the weights
    adapter_sha256: str = ""  # of its config and weights
    operators: Operators | None = None  # None: MindSpore's own compute it

    @property
    def ranks(self) -> int:
        """Ranks that share the model, each with graphs of its own."""
        return len(next(iter(self.graphs.values())).files)

    def paths(self, folder: Path, rank: int = 0) -> dict[GraphName, Path]:
        """Where the graphs of a rank are, of an artifact in `folder`."""
        return {name: folder / graph.files[rank] for name, graph in self.graphs.items()}

    def write(self, folder: Path) -> None:
        """Write manifest.json into a folder that holds all the files."""
        plain = {"schema": SCHEMA, **dataclasses.asdict(self), "model": to_plain(self.model)}
        text = json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
        (folder / MANIFEST).write_text(text, encoding="utf-8")


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of an artifact, its files compared with it.

    Raises ArtifactError where it is missing or broken, or a file is missing or another one.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise ArtifactError(f"{folder}: no {MANIFEST}")
    raw = read_json(path, "a manifest", most=MAX_BYTES)
    try:
        manifest = _from_plain(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: not a manifest of this version (schema {SCHEMA}): {error!r}",
            "export the model again",
        ) from error
    if manifest.operators and manifest.operators.format not in range(1, FORMAT + 1):
        raise ArtifactError(
            f"{path}: weights packed in format {manifest.operators.format}, but the operators here "
            f"read formats 1 to {FORMAT}",
            "export the model again",
        )
    names = [*manifest.files, *(file for graph in manifest.graphs.values() for file in graph.files)]
    if len({len(graph.files) for graph in manifest.graphs.values()}) != 1:
        raise ArtifactError(f"{path}: its graphs are of different numbers of ranks")
    for name in names:
        inside = (folder / name).resolve().is_relative_to(folder.resolve())
        if not inside or name not in manifest.files:
            raise ArtifactError(f"{path}: names the file {name!r}, which is not the artifact's")
    if check_files:
        for name, expected in manifest.files.items():
            _check_file(folder / name, expected)
    return manifest


def _check_file(path: Path, expected: str) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: missing, but the manifest names it", "export the model again")
    found = sha256_of(path)
    if found != expected:
        raise ArtifactError(
            f"{path}: another file than the one exported: sha256 {found[:16]}..., "
            f"expected {expected[:16]}...",
            "export the model again",
        )


def _from_plain(raw: Any) -> Manifest:
    fields = dict(raw)
    if fields.pop("schema") != SCHEMA:
        raise ValueError(f"schema {raw['schema']!r}")
    fields["model"] = from_plain(fields["model"])
    fields["graphs"] = {
        name: Graph(
            graph["file"],
            _specs(graph["inputs"]),
            _specs(graph["outputs"]),
            tuple(map(str, graph.get("others", ()))),
        )
        for name, graph in fields["graphs"].items()
    }
    fields["tokenizer"] = tuple(fields["tokenizer"])
    if (operators := fields.get("operators")) is not None:
        fields["operators"] = _operators(operators)
    return Manifest(**fields)


def _operators(raw: Mapping[str, Any]) -> Operators:
    found = Operators(**raw)
    if found.quant not in get_args(Quant) or found.kv_cache not in get_args(CacheType):
        raise ValueError(f"quant {found.quant!r}, kv_cache {found.kv_cache!r}")
    if not 1 <= int(found.capacity) <= MAX_CAPACITY:
        raise ValueError(f"capacity {found.capacity}")
    return found


def _specs(raw: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(one["name"], tuple(one["shape"]), one["dtype"]) for one in raw)
