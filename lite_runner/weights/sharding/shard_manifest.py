"""manifest.json beside each rank's shard: which shard of which model it is, and its SHA-256.

It lies in the rank's own folder, so that ranks may be written one by one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.hf import hf_from_model_config, model_config_from_hf
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write
from lite_runner.system.json_file import read_json_object

MANIFEST = "manifest.json"
SCHEMA = 1
MAX_BYTES = 1 << 20
_FIELDS = {"rank": int, "dp": int, "tp": int, "vocab_parallel": bool, "file": str, "sha256": str}


@dataclass(frozen=True)
class ShardManifest:
    """One rank's shard."""

    rank: int
    dp: int
    tp: int
    vocab_parallel: bool
    file: str
    sha256: str
    model: Decoder

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.dp, self.tp)

    @property
    def cut(self) -> tuple[int, int, bool, Decoder]:
        """What all ranks of a set share."""
        return self.dp, self.tp, self.vocab_parallel, self.model

    def write(self, folder: Path) -> None:
        """Write manifest.json beside the shard."""
        plain = {"schema": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}}
        plain["model"] = hf_from_model_config(self.model)
        with atomic_write(folder / MANIFEST) as file:
            file.write((json.dumps(plain, indent=1) + "\n").encode())


def read_shard_manifest(folder: Path) -> ShardManifest | None:
    """The manifest in a rank's folder; None if there is none. Raises ArtifactError."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    what = f"the manifest of a shard (schema {SCHEMA})"
    hint = "cut the checkpoint again (run_mode=shard)"
    raw = read_json_object(path, what, most=MAX_BYTES, hint=hint)
    try:
        manifest = _from_plain(raw, path)
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not {what}: {error!r}", hint) from error
    if Path(manifest.file).name != manifest.file or not (folder / manifest.file).is_file():
        raise ArtifactError(
            f"{path}: names the shard {manifest.file!r}, which is not in the folder",
            "copy the whole set again, or cut the checkpoint again (run_mode=shard)",
        )
    return manifest


def _from_plain(raw: Any, path: Path) -> ShardManifest:
    if raw["schema"] != SCHEMA:
        raise ValueError(f"schema {raw['schema']!r}")
    fields: dict[str, Any] = {name: raw[name] for name in _FIELDS}
    for name, kind in _FIELDS.items():
        if type(fields[name]) is not kind:
            raise ValueError(f"{name}: {fields[name]!r}")
    if not (fields["dp"] > 0 and 0 <= fields["rank"] < fields["dp"] * fields["tp"]):
        raise ValueError(f"rank {fields['rank']} of {fields['dp']} x {fields['tp']}")
    if not isinstance(raw["model"], dict):
        raise ValueError(f"model: {raw['model']!r}")
    return ShardManifest(**fields, model=model_config_from_hf(raw["model"], str(path)))


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
