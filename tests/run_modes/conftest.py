"""Fixtures of several run modes' tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in an empty folder, with an empty cache; gives result.json."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))

    def run(*overrides: str) -> dict[str, Any]:
        assert main(list(overrides)) == 0
        return json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))

    return run
