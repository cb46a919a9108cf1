"""Configs of runs, read from a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.run_modes import heads, resolve

Configure = Callable[..., RunConfig]


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Configure:
    """`configure("key=value", ...)`, of run_mode=predict unless it is named; the cache is empty."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))

    def configure(*settings: str) -> RunConfig:
        named = any(setting.startswith("run_mode=") for setting in settings)
        line = settings if named else ("predict_data=hi", *settings)
        return resolve(parse(line, heads()))[0]

    return configure
