"""What is said of a MindIR that a MindSpore Lite is too old for."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.backends.engines import lite
from lite_runner.backends.engines.mindir_version import check_reads, last_version, refused
from lite_runner.errors import EnvironmentFault

SAID = (
    "This software can only support the maximum mind ir version: {}, please install the latest"
    " version to support the mind ir version: {}"
)


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    path = tmp_path / "a.mindir"
    path.write_bytes(ModelProto(mind_ir_version=3).SerializeToString())
    return path


@pytest.mark.parametrize(
    ("release", "last"),
    [("2.0.0", 1), ("2.2.11", 1), ("2.3.0rc1", 2), ("2.4.10", 2), ("2.5.0", None), ("2.7.1", None)],
)
def test_what_a_release_reads(release: str, last: int | None) -> None:
    assert last_version(f"MindSpore Lite {release}") == last
    assert last_version("MindSpore Lite") is None


def test_a_lite_that_says_so_is_believed(newest: Path) -> None:
    fault = refused(newest, SAID.format(2, 3), "MindSpore Lite 2.5.0")
    assert fault is not None and fault.exit_code == 3
    assert fault.message == (
        f"{newest}: MindIR version 3, but MindSpore Lite 2.5.0 reads at most version 2"
    )
    assert fault.hint == "install MindSpore Lite 2.6 or newer, or choose engine=graph-cell"
    fault = refused(newest, SAID.format(3, 4), "MindSpore Lite 2.7.1")
    assert fault is not None and "of the release that wrote it" in fault.hint


def test_a_lite_that_says_nothing_is_known_by_its_release(newest: Path) -> None:
    said = "build_from_file failed! Error is Common error code."
    fault = refused(newest, said, "MindSpore Lite 2.2.14")
    assert fault is not None and "reads at most version 1" in fault.message
    assert refused(newest, said, "MindSpore Lite 2.7.1") is None
    newest.write_bytes(ModelProto(mind_ir_version=1).SerializeToString())
    assert refused(newest, said, "MindSpore Lite 2.2.14") is None


def test_it_is_known_before_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match=r"writes MindIR version 3, but .*2\.2\.14 reads at"):
        check_reads("MindSpore Lite 2.2.14", 3)
    check_reads("MindSpore Lite 2.2.14", 1)
    check_reads("MindSpore Lite 2.7.1", 3)
    lite.check_reads(3)  # there is none here
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(EnvironmentFault, match=r"MindSpore Lite 2\.3\.1 reads at most version 2"):
        lite.check_reads(3)
