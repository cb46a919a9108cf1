"""What is kept in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.doctor import caches
from lite_runner.doctor.check import Finding


def test_an_empty_cache(tmp_path: Path) -> None:
    assert caches.kept(tmp_path / "graphs") == Finding("ok", "empty")
    (tmp_path / "graphs").mkdir()
    assert caches.kept(tmp_path / "graphs") == Finding("ok", "empty")


def test_the_command_that_empties_it_names_what_is_there(tmp_path: Path) -> None:
    hub, packages = tmp_path / "the hub", tmp_path / "pypi"
    hub.mkdir()
    (hub / "weights").write_bytes(bytes(2_000_000))
    found = caches.kept(hub, packages)
    assert found.status == "ok"
    assert found.found == f"2.0 MB in {hub}"
    assert found.remedy == f"to empty it: rm -r '{hub}'"


def test_what_is_used_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path))
    assert caches.against("10GB").found == "0 B of 10GB for compiled graphs and exports"
    for name in ("graphs", "artifacts", "hub"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(bytes(1_000_000))
    assert caches.against("10GB").found == "2.0 MB of 10GB for compiled graphs and exports"
