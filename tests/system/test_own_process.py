"""Work in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.system import own_process

SCRIPT = """
import os, signal, sys
from lite_runner.errors import ConfigError
from lite_runner.system import own_process


def work(job):
    print("chatter", flush=True)
    if job["do"] == "refuse":
        raise ConfigError("not such a one", "another")
    if job["do"] == "fail":
        raise ValueError("a bug")
    if job["do"] == "die":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(7)
    if job["do"] == "interrupt":
        raise KeyboardInterrupt
    return {"did": job["do"]}


if __name__ == "__main__":
    sys.exit(own_process.serve(work))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_work.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "some_work"


def test_it_answers(module: str) -> None:
    assert own_process.ask(module, {"do": "something"}) == {"did": "something"}
    assert own_process.ask(module, {"do": "refuse"}) == {"error": "not such a one\n  -> another"}
    assert own_process.ask(module, {"do": "fail"}) == {"error": "ValueError: a bug"}


def test_it_ends(module: str) -> None:
    died = own_process.ask(module, {"do": "die"})
    assert died == {"error": "its process ended with 7: chatter\nthe last words"}
    with pytest.raises(KeyboardInterrupt):
        own_process.ask(module, {"do": "interrupt"})
