"""Manifests as files: types, names of files, the checksum."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights.manifest_file import (
    FileName,
    FilePath,
    Sha256,
    read_manifest,
    write_manifest,
)

SHA = "0" * 64


@dataclass(frozen=True)
class _Section:
    count: int
    files: Mapping[FilePath, Sha256]
    name: FileName = "a"


PLAIN: dict[str, Any] = {"schema": 1, "count": 3, "files": {"a": SHA, "b/c": SHA}, "name": "é.json"}


def read(path: Path) -> _Section:
    return read_manifest(path, _Section, "a test", schema=1, most=10_000, hint="again")


def test_a_written_manifest_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.json"
    write_manifest(path, PLAIN)
    assert read(path) == _Section(3, {"a": SHA, "b/c": SHA}, "é.json")
    assert capsys.readouterr().err == ""
    path.write_text(json.dumps(json.loads(path.read_text())))  # laid out otherwise
    assert read(path).count == 3


def test_one_without_a_checksum_is_noted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(PLAIN))
    assert read(path) == read(path) == _Section(3, {"a": SHA, "b/c": SHA}, "é.json")
    assert capsys.readouterr().err.count("without a checksum of itself") == 1


@pytest.mark.parametrize("change", [{"count": 4}, {"checksum": SHA}, {"checksum": 5}])
def test_an_edited_manifest_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "m.json"
    write_manifest(path, PLAIN)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=r"m\.json: edited or damaged") as error:
        read(path)
    assert error.value.hint == "again"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": True}, "count: got true, expected an integer"),
        ({"count": "3"}, "count: got '3', expected an integer"),
        ({"schema": 2}, "schema 2, expected 1"),
        ({"schema": True}, "schema True, expected 1"),
        ({"more": 1}, "more: no such key"),
        ({"files": []}, "files: got"),
        ({"files": {"a": 5}}, "files.a: got 5, expected a string"),
        ({"files": {"a": "0" * 63}}, "64 hexadecimal digits"),
        ({"files": {"../a": SHA}}, "naming a file of the artifact"),
        ({"files": {"/a": SHA}}, "naming a file of the artifact"),
        ({"files": {"b\\a": SHA}}, "naming a file of the artifact"),
        ({"name": "a/b"}, "without folders"),
        ({"name": ".."}, "without folders"),
        ({"name": ""}, "without folders"),
        ({"name": "a\0"}, "without folders"),
        ({"name": "é" * 200}, "without folders"),
        ({"name": "\ud800"}, "surrogate"),
        ({"count": float("inf")}, "Infinity"),
    ],
)
def test_fields_that_are_wrong(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(PLAIN | change))
    with pytest.raises(ArtifactError) as error:
        read(path)
    assert message in error.value.message and str(path) in error.value.message


def test_a_missing_field_and_another_json(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"schema": 1, "count": 3}')
    with pytest.raises(ArtifactError, match="files: missing"):
        read(path)
    path.write_text("[]")
    with pytest.raises(ArtifactError, match="expected an object"):
        read(path)
