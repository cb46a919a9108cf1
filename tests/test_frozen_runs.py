"""Output, results and exit codes of runs stay as they are: see frozen_runs.py."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.backends.lite.export import writer
from tests import frozen_runs as frozen


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All that the runs gave, one after another."""
    with frozen.beside(tmp_path_factory.mktemp("runs")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "verify", lambda *_, **__: None)  # compiles the export once more
        return frozen.found()


@pytest.mark.parametrize("name", frozen.NAMES)
def test_frozen_runs_are_unchanged(found: dict[str, dict[str, Any]], name: str) -> None:
    expected = frozen.stored()[name]
    differences = [
        f"{run}: was {was}, is {found[name].get(run)}"
        for run, was in expected.items()
        if found[name].get(run) != was
    ]
    assert not differences, "\n".join(["", *differences])
