"""manifest.json beside one rank's shards of adapters: their layout, and what each is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from lite_runner.config.fields import Range
from lite_runner.config.manifest_file import Sha256, read_manifest, write_manifest
from lite_runner.records import dataclass
from lite_runner.weights.sharding.shard_manifest import MANIFEST as MANIFEST
from lite_runner.weights.sharding.shard_manifest import MAX_RANKS

SCHEMA = 1
MAX_BYTES = 64 << 20
AGAIN = "cut them again: adapter_path= the whole adapters, auto_trans_ckpt=true"


@dataclass(frozen=True)
class AdapterEntry:
    """One adapter, whose file is named after it."""

    source: Sha256  # of the whole adapter
    sha256: Sha256  # of the file
    scale: Mapping[str, float]  # of each weight


@dataclass(frozen=True)
class AdapterManifest:
    """The shards of one rank."""

    tensor_index: Annotated[int, Range(0, MAX_RANKS - 1)]
    tp: Annotated[int, Range(1, MAX_RANKS)]
    vocab_parallel: bool
    model: Mapping[str, object]  # a config.json
    adapters: Mapping[str, AdapterEntry]


def write_adapter_manifest(
    folder: Path, cut: Mapping[str, Any], entries: Mapping[str, AdapterEntry]
) -> None:
    """Write manifest.json into a rank's folder; `cut`: all fields but the adapters."""
    adapters = {name: asdict(entry) for name, entry in entries.items()}
    write_manifest(folder / MANIFEST, {"schema": SCHEMA, **cut, "adapters": adapters})


def read_adapter_manifest(folder: Path) -> AdapterManifest:
    """The manifest in a rank's folder. Raises ArtifactError: missing, broken or edited."""
    return read_manifest(
        folder / MANIFEST,
        AdapterManifest,
        f"the manifest of adapters that are cut (schema {SCHEMA})",
        schema=SCHEMA,
        most=MAX_BYTES,
        hint=AGAIN,
        artifact=folder.parent,
    )
