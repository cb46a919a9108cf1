"""Models that were exported before load, and say what they said then: see frozen_artifacts.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import native
from tests import frozen_artifacts as frozen
from tests.conftest import Reference

LITE = {"resizable", "resizable_biases", "ms", "ms_fp16"}
ROUNDED = {name for name in frozen.EXPORTS if name.startswith(("a", "packed_"))}


@pytest.fixture(params=frozen.EXPORTS)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """An artifact; the current folder is an empty one."""
    found: str = request.param
    if found in LITE:
        lite_python = request.getfixturevalue("lite_python")
        monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    return found


def test_gives_the_same_text(name: str) -> None:
    assert frozen.predicted(name) == frozen.expected_tokens(name)


def test_gives_the_same_logits(
    name: str,
    reference: Callable[[str], Reference],
    relative_error: Callable[[NDArray[np.float32], NDArray[np.float32]], float],
) -> None:
    found = frozen.logits(name)
    if found is None:  # the graph gives tokens
        assert name == "pair_sampled"
        return
    # Our operators round what enters a matrix: with other instructions it may round the other way.
    other = name in ROUNDED and native.instructions() != frozen.INSTRUCTIONS
    assert relative_error(found, frozen.expected_logits(name)) < (2e-3 if other else 1e-5)
    if name not in ROUNDED | {"ms_fp16"}:
        assert (
            relative_error(found, reference(frozen.EXPORTS[name][0]).logits[frozen.PROMPTS]) < 1e-4
        )
