"""Two ranks that cannot meet; that they do is in test_machine.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from lite_runner.distributed import msrun
from lite_runner.doctor import two_ranks
from lite_runner.doctor.check import Check
from lite_runner.system import memory


def test_a_port() -> None:
    assert two_ranks.port().found.endswith(" is free")


def test_no_loopback_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> object:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(msrun.socket, "getaddrinfo", refused)
    found = Check("port", two_ranks.port).finding()
    assert found.status == "fail"
    assert "Address family not supported" in found.found


def test_without_memory_they_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)
    found = two_ranks.gather()
    assert found.status == "warn"
    assert found.found.startswith("not tried: ")


def test_a_failing_rank_is_reported_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        "from lite_runner.distributed.events import connect\n"
        "from lite_runner.distributed.events import Failure\n"
        "if os.environ['MS_ROLE'] == 'MS_WORKER':\n"
        "    sender = connect(int(os.environ['RANK_ID']))\n"
        "    sender.error(Failure(3, 'no such device', 'get one'))\n"
        "    os._exit(3)\n"
    )
    left = tmp_path / "tmp"
    left.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    monkeypatch.setattr(two_ranks, "PROGRAM", program)
    found = two_ranks.gather()
    assert (found.status, found.remedy) == ("fail", "get one")
    assert "no such device" in found.found
    assert "log:" not in found.found
    assert list(left.iterdir()) == []


def test_without_msrun_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msrun.sys, "executable", str(tmp_path / "python"))
    found = two_ranks.gather()
    assert found.status == "fail"
    assert "msrun, which starts several ranks, is not beside this Python" in found.found
