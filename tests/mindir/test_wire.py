"""The version in a MindIR, read without MindSpore."""

from __future__ import annotations

from pathlib import Path

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.mindir.wire import mindir_version


@pytest.mark.parametrize("version", [None, 0, 1, 3, 2**40])
def test_the_version_of_a_file(tmp_path: Path, version: int | None) -> None:
    model = ModelProto(ir_version="0.1.1", producer_name="MindSpore", little_endian=True)
    model.graph.name = "graph" * 100
    if version is not None:
        model.mind_ir_version = version
    path = tmp_path / "a.mindir"
    path.write_bytes(model.SerializeToString())
    assert mindir_version(path) == version


@pytest.mark.parametrize("data", [b"", b"\xff" * 30, b"\x0a\x7fshort", b"not a model" * 9])
def test_what_is_no_mindir(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.mindir"
    path.write_bytes(data)
    assert mindir_version(path) is None
    assert mindir_version(tmp_path / "missing") is None
