"""What doctor tells of MindFormers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.backends.mindformers.releases import RELEASES
from lite_runner.backends.workers import python as workers
from lite_runner.doctor import mindformers
from lite_runner.doctor.check import Check, Finding
from tests.paths import ROOT

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """`program("1.9.0", "echo 1.9.0 2.10.0")`: what the Python of a release does; else none is."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", "/nowhere")
    monkeypatch.setattr(workers, "_CHECKOUT", ROOT / "tests")
    for release in RELEASES.values():
        monkeypatch.delenv(release.python.variable, raising=False)

    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setenv(RELEASES[name].python.variable, str(path))

    return put


def look(*, needed: bool) -> Finding:
    return Check("mindformers", lambda: mindformers.pythons(needed=needed)).finding()


@pytest.mark.usefixtures("program")
def test_none_is_a_failure_only_where_it_is_asked_for() -> None:
    found = look(needed=False)
    assert (found.status, found.found) == (
        "ok",
        "no 1.0.2; no 1.9.0 (for backend=mindformers alone)",
    )
    assert "in a checkout: make mindformers" in found.remedy
    assert look(needed=True).status == "fail"


def test_both(program: Program, tmp_path: Path) -> None:
    program("1.0.2", "echo 1.0.2 2.0.0")
    program("1.9.0", "echo 1.9.0 2.10.0")
    found = look(needed=True)
    assert (found.status, found.remedy) == ("ok", "")
    assert f"1.9.0 on mindspore 2.10.0, in a worker: {tmp_path / '1.9.0'}" in found.found


@pytest.mark.parametrize(
    ("text", "has"),
    [("echo 1.3.2 2.10.0", "1.3.2 on mindspore 2.10.0"), ("exit 1", "no MindFormers")],
)
def test_one_that_is_broken(program: Program, text: str, has: str) -> None:
    program("1.9.0", text)
    found = look(needed=False)
    assert found.status == "fail" and f"has {has}" in found.found
    assert found.remedy == "make mindformers"
