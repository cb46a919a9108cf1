"""manifest.json beside each rank's shard: which shard of which model it is, and its SHA-256.

It lies in the rank's own folder, so that ranks may be written one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from lite_runner.architectures.spec import Decoder
from lite_runner.config.parallel import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import Range, dataclass
from lite_runner.weights.hf import hf_from_model_config, model_config_from_hf
from lite_runner.weights.manifest_file import FileName, Sha256, read_manifest, write_manifest

MANIFEST = "manifest.json"
SCHEMA = 1
MAX_BYTES = 1 << 20
MAX_RANKS = 1 << 16
_WHAT = f"the manifest of a shard (schema {SCHEMA})"
_HINT = "cut the checkpoint again (run_mode=shard)"


@dataclass(frozen=True)
class _Shard:
    """The fields of a shard's manifest but the model."""

    rank: Annotated[int, Range(0, MAX_RANKS - 1)]
    dp: Annotated[int, Range(1, MAX_RANKS)]
    tp: Annotated[int, Range(1, MAX_RANKS)]
    vocab_parallel: bool
    file: FileName
    sha256: Sha256


@dataclass(frozen=True)
class _Stored(_Shard):
    model: Mapping[str, object]  # a config.json


@dataclass(frozen=True)
class ShardManifest(_Shard):
    """One rank's shard."""

    model: Decoder

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.dp, self.tp)

    @property
    def cut(self) -> tuple[int, int, bool, Decoder]:
        """The fields that all ranks of a set share."""
        return self.dp, self.tp, self.vocab_parallel, self.model

    def write(self, folder: Path) -> None:
        """Write manifest.json beside the shard."""
        plain = {field.name: getattr(self, field.name) for field in fields(_Shard)}
        model = hf_from_model_config(self.model)
        write_manifest(folder / MANIFEST, {"schema": SCHEMA, **plain, "model": model})


def read_shard_manifest(folder: Path) -> ShardManifest | None:
    """The manifest in a rank's folder; None if there is none. Raises ArtifactError."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    stored = read_manifest(
        path, _Stored, _WHAT, schema=SCHEMA, most=MAX_BYTES, hint=_HINT, artifact=folder.parent
    )
    if stored.rank >= stored.dp * stored.tp:
        raise ArtifactError(
            f"{path}: not {_WHAT}: rank {stored.rank} of {stored.dp} x {stored.tp}", _HINT
        )
    try:
        model = model_config_from_hf(dict(stored.model), str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not {_WHAT}: {error!r}", _HINT) from error
    if not (folder / stored.file).is_file():
        raise ArtifactError(
            f"{path}: names the shard {stored.file!r}, which is not in the folder",
            "copy the whole set again, or cut the checkpoint again (run_mode=shard)",
        )
    given = {field.name: getattr(stored, field.name) for field in fields(_Shard)}
    return ShardManifest(**given, model=model)


def rank_folders(folder: Path) -> list[tuple[int, Path]]:
    """(N, folder rank_N) of a sharded checkpoint, by N; empty if it is not sharded."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), item)
        for item in folder.iterdir()
        if (match := re.fullmatch(r"rank_(\d{1,6})", item.name)) and item.is_dir()
    ]
    return sorted(found)


def shards_model(folder: Path) -> Decoder | None:
    """The model in the manifests of a set; None if it has no manifests."""
    manifests = (read_shard_manifest(path) for _, path in rank_folders(folder))
    return next((manifest.model for manifest in manifests if manifest), None)
