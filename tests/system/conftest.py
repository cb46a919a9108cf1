"""A tree of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.system import memory


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mount of cgroups; this process is in job/step of those of either version."""
    monkeypatch.setattr(memory, "_MOUNT", tmp_path)
    folder = tmp_path / "own"
    folder.write_text("5:cpu,cpuacct:/job/step\n4:memory:/job/step\n0::/job/step\n")
    monkeypatch.setattr(memory, "_OWN", folder)
    return tmp_path
