"""Computations of the MindFormers process in place of MindFormers."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Tensor

from lite_runner.backends.mindformers import worker


def test_the_stand_in_for_argmax_is_numpys() -> None:
    rng = np.random.default_rng(1)
    for shape in ((1, 7), (3, 50), (2, 4096)):
        logits = rng.normal(size=shape).astype(np.float32)
        found = worker.argmax(Tensor(logits), -1).asnumpy()
        assert np.array_equal(found, np.argmax(logits, -1))
    ties = np.array([[0, 2, 2, 1], [5, 5, 5, 5], [-1, -3, -1, -2]], np.float32)
    assert np.array_equal(worker.argmax(Tensor(ties), -1).asnumpy(), np.argmax(ties, -1))


def test_imports_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that leaves no bytecode of our own files."""
    stub = SimpleNamespace(bfloat16=None, GRAPH_MODE=0, set_context=lambda **_: None)
    monkeypatch.setitem(sys.modules, "mindspore", stub)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(logging, "disable", lambda _: None)
    monkeypatch.setenv("GLOG_v", "3")
    assert worker.import_mindspore("CPU") is stub
    assert not sys.dont_write_bytecode
