"""Manifests: JSON files that describe an artifact of ours, each with a checksum of itself.

The fields are those of a dataclass, as in configs (config/__init__.py), beside `schema` and
`checksum`: the SHA-256 of all others as JSON without spaces, with sorted keys.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from lite_runner import progress
from lite_runner.config import Invalid, read
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import atomic_write, read_json_object

CHECKSUM = "checksum"
MAX_FAULTS = 5  # listed in a message
MAX_NAME = 255  # bytes of a file name, on all common file systems
_SHA256 = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


class _Digest:
    def __contains__(self, text: str) -> bool:
        return _SHA256.fullmatch(text) is not None

    def __str__(self) -> str:
        return "of 64 hexadecimal digits"


@dataclass(frozen=True)
class _PathBelow:
    """A relative path that stays below the manifest's folder."""

    depth: int  # folders and file

    def __contains__(self, text: str) -> bool:
        parts = text.split("/")
        return len(parts) <= self.depth and all(map(_is_name, parts))

    def __str__(self) -> str:
        return "naming a file of the artifact" + ("" if self.depth > 1 else ", without folders")


def _is_name(text: str) -> bool:
    controls = any(letter < " " or letter == "\\" for letter in text)
    return text not in ("", ".", "..") and not controls and len(text.encode()) <= MAX_NAME


Sha256 = Annotated[str, _Digest()]
FileName = Annotated[str, _PathBelow(1)]
FilePath = Annotated[str, _PathBelow(8)]


def write_manifest(path: Path, plain: Mapping[str, Any]) -> None:
    """Write a manifest and its checksum, atomically. Raises EnvironmentFault."""
    text = json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1, ensure_ascii=False)
    with atomic_write(path) as file:
        file.write(f"{text}\n".encode())


def read_manifest(
    path: Path,
    section: type[_T],
    what: str,
    *,
    schema: int,
    most: int,
    hint: str,
    artifact: Path | None = None,
) -> _T:
    """The manifest in a file, as the dataclass `section`.

    One without a checksum, as earlier releases wrote them, is read with a note to the user, which
    is given once of an `artifact` (None: the file's folder). Raises ArtifactError,
    "{path}: not {what}: ...", with `hint`: broken, edited, or of another schema.
    """
    raw = read_json_object(path, what, most=most, hint=hint)
    has_checksum = CHECKSUM in raw
    checksum = raw.pop(CHECKSUM, None)
    fields = {name: value for name, value in raw.items() if name != "schema"}
    errors: list[Invalid] = []
    if type(raw.get("schema")) is not int or raw["schema"] != schema:
        errors.append(Invalid(("schema",), f"schema {raw.get('schema')!r}, expected {schema}"))
    found: _T = read(fields, section, "", errors)
    if errors:
        more = f"; {len(errors) - MAX_FAULTS} more" if len(errors) > MAX_FAULTS else ""
        texts = "; ".join(error.text for error in errors[:MAX_FAULTS])
        raise ArtifactError(f"{path}: not {what}: {texts}{more}", hint)
    if not has_checksum:
        _note_unchecked(what, artifact or path.parent)
    elif checksum != _checksum(raw):
        raise ArtifactError(f"{path}: edited or damaged: its checksum does not match", hint)
    return found


def _checksum(plain: Mapping[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _note_unchecked(what: str, artifact: Path) -> None:
    progress.note(
        f"note: {artifact}: {what}, without a checksum of itself: an earlier release wrote it, and "
        "a change in it goes unseen; writing it again adds one"
    )
