"""manifest.json beside each rank's shard: which shard of which model it is, and its SHA-256.

It is in the rank's own folder, so that ranks may be written one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import Range, dataclass
from lite_runner.weights.formats import model_config_from_hf
from lite_runner.weights.manifest_file import FileName, Sha256, read_manifest, write_manifest

MANIFEST = "manifest.json"
SCHEMA = 1
MAX_BYTES = 1 << 20
MAX_RANKS = 1 << 16
_WHAT = f"the manifest of a shard (schema {SCHEMA})"
_HINT = "shard the checkpoint again (run_mode=shard)"


@dataclass(frozen=True)
class ShardManifest:
    """One rank's shard."""

    rank: Annotated[int, Range(0, MAX_RANKS - 1)]
    dp: Annotated[int, Range(1, MAX_RANKS)]
    tp: Annotated[int, Range(1, MAX_RANKS)]
    vocab_parallel: bool
    file: FileName
    sha256: Sha256
    model: Mapping[str, object]  # a config.json

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.rank, self.dp, self.tp)

    @property
    def layout(self) -> tuple[int, int, bool, Mapping[str, object]]:
        """The fields that all ranks of a set share."""
        return self.dp, self.tp, self.vocab_parallel, self.model

    def decoder(self) -> Decoder:
        """The model. Raises ValueError, KeyError, TypeError and RunnerError."""
        return model_config_from_hf(dict(self.model), MANIFEST, notes=False)

    def write(self, folder: Path) -> None:
        write_manifest(folder / MANIFEST, {"schema": SCHEMA, **asdict(self)})


def read_shard_manifest(folder: Path) -> ShardManifest | None:
    """The manifest in a rank's folder; None if there is none. Raises ArtifactError."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = read_manifest(
        path,
        ShardManifest,
        _WHAT,
        schema=SCHEMA,
        most=MAX_BYTES,
        hint=_HINT,
        artifact=folder.parent,
    )
    if manifest.rank >= manifest.dp * manifest.tp:
        raise ArtifactError(
            f"{path}: not {_WHAT}: rank {manifest.rank} of {manifest.dp} x {manifest.tp}", _HINT
        )
    try:
        model_config_from_hf(dict(manifest.model), str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: not {_WHAT}: {error!r}", _HINT) from error
    if not (folder / manifest.file).is_file():
        raise ArtifactError(
            f"{path}: names the shard {manifest.file!r}, which is not in the folder",
            "copy the whole set again, or shard the checkpoint again (run_mode=shard)",
        )
    return manifest


def shards_model(folders: Iterable[Path]) -> Decoder | None:
    """The model in the manifests of the ranks' folders; None if they have none."""
    manifests = map(read_shard_manifest, folders)
    return next((manifest.decoder() for manifest in manifests if manifest), None)
