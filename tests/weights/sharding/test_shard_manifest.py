"""Manifests of shards that are damaged, and those of earlier releases."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.sharding.shards import open_shards, whole_tensors
from tests.mutations import mutated


def test_mutations_of_a_manifest_are_refused_or_read(folder: Path, model: Decoder) -> None:
    path, generator = folder / "rank_1/manifest.json", random.Random(0)
    whole = json.loads(path.read_text())
    del whole["checksum"]
    for _ in range(300):
        path.write_text(json.dumps(mutated(copy.deepcopy(whole), generator)))
        try:
            open_shards(folder, model)
        except ArtifactError as error:
            assert str(folder) in error.message


def test_a_set_of_an_earlier_release_is_noted_once(
    folder: Path, model: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in folder.glob("rank_*/manifest.json"):
        whole = json.loads(path.read_text())
        del whole["checksum"]
        path.write_text(json.dumps(whole))
    for _ in range(2):
        whole_tensors(folder, model)
    assert capsys.readouterr().err.count(f"{folder}: ") == 1
