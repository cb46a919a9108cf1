"""Memory for MindFormers' processes, checked before any of them is started."""

from __future__ import annotations

import sys

import pytest

from lite_runner.app import main
from lite_runner.backends.mindformers import releases, run
from lite_runner.system import memory

LINE = ["model=tiny_bloom", "backend=mindformers", "load_checkpoint=random"]
RANKS = ["use_parallel=true", "parallel_config.data_parallel=2"]


def test_a_machine_that_is_too_small_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (releases, run):
        monkeypatch.setattr(module, "python_for", lambda *_: sys.executable)
    monkeypatch.setattr(memory, "free_memory", lambda: 10**8)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    # Of several the sum; what one process has taken already is part of its own need.
    for ranks, expected in (([], "memory: the run needs "), (RANKS, "memory: 2 ranks ")):
        assert main([*LINE, "predict_data=[hi,there]", *ranks]) == 3
        told = capsys.readouterr().err
        assert expected in told and "100.0 MB is free" in told, told
        assert "load MindFormers" not in told
