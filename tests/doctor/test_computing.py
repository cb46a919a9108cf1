"""MindSpore, operators, compiler and Lite that are broken or missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lite_runner import native
from lite_runner.backends.engines import lite
from lite_runner.backends.engines.lite_python import VARIABLE
from lite_runner.doctor import child, computing
from lite_runner.doctor.check import Check, Finding
from lite_runner.system import packages


def test_mindspore_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: None)
    found = computing.mindspore()
    assert (found.status, found.found) == ("fail", "not installed")
    assert '"mindspore>=2.10,<3"' in found.remedy
    assert '"numpy>=1.25,<2"' in found.remedy  # of which MindSpore alone would bring the newest


def test_mindspore_that_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mindspore.py").write_text("raise ImportError('libfoo.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Check("mindspore", computing.mindspore).finding()
    assert found.status == "fail"
    assert "importing it fails: libfoo.so: no such file" in found.found
    assert found.remedy.endswith('--force-reinstall --no-deps "mindspore>=2.10,<3"')


def test_operators_that_were_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "operators.so")
    found = computing.operators()
    assert found.status == "warn"
    assert "they were not built" in found.found
    assert "install a C++ compiler" in found.remedy


def test_operators_of_other_sources(other_operators: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "LIBRARY", other_operators)
    found = computing.operators()
    assert found.status == "warn"
    assert "built from other sources" in found.found
    assert "build_ext --inplace" in found.remedy


def test_operators_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "ask", lambda question, timeout: "portable")
    monkeypatch.setattr(computing.platform, "machine", lambda: "x86_64")
    assert computing.operators().status == "warn"
    monkeypatch.setattr(computing.platform, "machine", lambda: "aarch64")
    assert computing.operators().status == "ok"


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_no_compiler_matters_only_where_operators_are_not_built(
    no_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert computing.cxx() == Finding("ok", "no C++ compiler")
    monkeypatch.setattr(native, "LIBRARY", no_compiler / "operators.so")
    found = computing.cxx()
    assert found.status == "warn"
    assert "install g++" in found.remedy


def test_the_compiler_that_is_asked_for_is_tried(no_compiler: Path) -> None:
    compiler = no_compiler / "g++"
    compiler.write_text("#!/bin/sh\necho 'g++ 12.2'\n")
    compiler.chmod(0o755)
    assert computing.cxx() == Finding("ok", "g++: g++ 12.2")
    compiler.write_text("#!/bin/sh\necho 'no cc1plus' >&2\nexit 1\n")
    assert computing.cxx() == Finding("warn", "g++ does not run\nno cc1plus", remedy="set CXX")


def test_a_compiler_that_is_not_there(no_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "icpx -O1")
    found = Check("compiler", computing.cxx).finding()
    assert found.status == "fail"
    assert "icpx: cannot be started" in found.found


def test_no_lite_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/python")
    found = computing.mindspore_lite()
    assert found.status == "warn"
    assert "/nowhere/python: not an executable" in found.found
    assert "engine=graph-cell" in found.found


def test_a_python_without_lite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    found = computing.mindspore_lite()
    assert found.status == "fail"
    assert "No module named 'mindspore_lite'" in found.found


def test_lite_in_a_worker(lite_python: Path) -> None:
    found = computing.mindspore_lite()
    assert found.status == "ok"
    assert "in a worker: " in found.found


def test_lite_in_this_python_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lite, "available", lambda: True)
    (tmp_path / "mindspore_lite.py").write_text("__version__ = '2.7.0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert computing.mindspore_lite() == Finding("ok", "MindSpore Lite 2.7.0, in this Python")
