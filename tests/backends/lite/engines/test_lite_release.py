"""Errors for a MindIR that a MindSpore Lite is too old for."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.backends.lite.engines import lite, lite_release
from lite_runner.backends.lite.engines.lite_release import (
    LITE,
    check_reads,
    convert_to_ms,
    last_version,
    refused,
)
from lite_runner.backends.workers import python as module
from lite_runner.errors import ArtifactError, EnvironmentFault
from tests.paths import ROOT

TOO_NEW = (
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
def test_versions_that_a_release_reads(release: str, last: int | None) -> None:
    assert last_version(f"MindSpore Lite {release}") == last
    assert last_version("MindSpore Lite") is None


def test_a_lite_that_says_so_is_believed(newest: Path) -> None:
    fault = refused(newest, TOO_NEW.format(2, 3), "MindSpore Lite 2.5.0")
    assert fault is not None and fault.exit_code == 3
    assert fault.message == (
        f"{newest}: MindIR version 3, but MindSpore Lite 2.5.0 reads at most version 2"
    )
    assert fault.hint == "install MindSpore Lite 2.6 or newer, or choose engine=graph-cell"
    fault = refused(newest, TOO_NEW.format(3, 4), "MindSpore Lite 2.7.1")
    assert fault is not None and "of the release that wrote it" in fault.hint


def test_a_lite_that_says_nothing_is_known_by_its_release(newest: Path) -> None:
    message = "build_from_file failed! Error is Common error code."
    fault = refused(newest, message, "MindSpore Lite 2.2.14")
    assert fault is not None and "reads at most version 1" in fault.message
    assert refused(newest, message, "MindSpore Lite 2.7.1") is None
    newest.write_bytes(ModelProto(mind_ir_version=1).SerializeToString())
    assert refused(newest, message, "MindSpore Lite 2.2.14") is None


def test_it_is_known_before_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match=r"writes MindIR version 3, but .*2\.2\.14 reads at"):
        check_reads("MindSpore Lite 2.2.14", 3)
    check_reads("MindSpore Lite 2.2.14", 1)
    check_reads("MindSpore Lite 2.7.1", 3)
    lite.check_reads(3)  # there is none here
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.3.1")
    with pytest.raises(EnvironmentFault, match=r"MindSpore Lite 2\.3\.1 reads at most version 2"):
        lite.check_reads(3)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True)
    path.touch(mode=0o755)
    return path


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without an environment, an empty cache, no wish."""
    (tmp_path / "checkout/conf").mkdir(parents=True)
    monkeypatch.setattr(module, "_CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LITE_RUNNER_LITE_PYTHON", raising=False)
    return tmp_path


def test_this_checkout_has_one(lite_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITE_RUNNER_LITE_PYTHON", raising=False)
    assert LITE.find() == lite_python


def test_the_order(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = program(places / "cache/lite/bin/python")
    assert LITE.find() == cached
    own = program(places / "checkout/.venv-lite/bin/python")
    assert LITE.find() == own
    chosen = program(places / "chosen/python")
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(chosen))
    assert LITE.find() == chosen


def test_an_installed_package_is_no_checkout(places: Path) -> None:
    program(places / "checkout/.venv-lite/bin/python")
    (places / "checkout/conf").rmdir()
    with pytest.raises(EnvironmentFault, match=r"cache/lite/bin/python not found"):
        LITE.find()


def test_there_is_none(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        EnvironmentFault, match=r"\.venv-lite/bin/python and .* not found"
    ) as caught:
        LITE.find()
    assert "make lite" in caught.value.hint and "mindspore-lite==2.0.0" in caught.value.hint
    program(places / "checkout/.venv-lite/bin/python").chmod(0o644)
    with pytest.raises(EnvironmentFault, match="not found"):
        LITE.find()
    for wrong in (places / "nowhere", places):
        monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(wrong))
        with pytest.raises(EnvironmentFault, match=f"LITE_RUNNER_LITE_PYTHON={wrong}"):
            LITE.find()


def test_the_pin_is_the_one_that_is_advised() -> None:
    pins = (ROOT / "requirements/lite.txt").read_text()
    assert "mindspore-lite==2.0.0 " in pins


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`pretend.write_text(...)`: the shell script that runs in place of the converter."""
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(python))
    return python


@pytest.mark.parametrize("weight_fp16", [False, True])
def test_a_model(
    lite_python: Path,
    tiny_mindir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_fp16: bool,
) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    target = tmp_path / "new folder/tiny.v1.ms"
    convert_to_ms(tiny_mindir, target, weight_fp16=weight_fp16)
    assert target.stat().st_size > 100 and target.stat().st_mode & 0o777 == 0o644
    assert list(target.parent.iterdir()) == [target]


def test_a_mindir_that_it_refuses(
    lite_python: Path, exported_mindir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    with pytest.raises(EnvironmentFault, match="reads at most version 1") as caught:
        convert_to_ms(exported_mindir, tmp_path / "out/a.ms", weight_fp16=False)
    assert str(exported_mindir) in caught.value.message
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("echo CONVERT RESULT SUCCESS:0", "wrote no model"),
        (">$5.ms; echo CONVERT RESULT SUCCESS:0", "wrote no model"),
        ("echo x >$5.ms; echo '[ERROR] LITE no'; echo CONVERT RESULT SUCCESS:0", "reports errors"),
        ("echo x >$5.ms; echo well", "does not report success; it wrote:\n    well"),
        ("echo x >$5.ms; echo CONVERT RESULT SUCCESS:0; exit 9", "exit code 9"),
        ("echo x >$5.ms; kill -9 $$", "exit code -9"),
    ],
)
def test_success_is_not_believed(
    pretend: Path, tiny_mindir: Path, tmp_path: Path, does: str, words: str
) -> None:
    pretend.write_text(f"#!/bin/sh\n{does}\n")
    target = tmp_path / "out/a.ms"
    target.parent.mkdir()
    target.write_text("of before")
    with pytest.raises(ArtifactError, match="the converter of MindSpore Lite") as caught:
        convert_to_ms(tiny_mindir, target, weight_fp16=False)
    assert words in caught.value.message
    assert target.read_text() == "of before" and len(list(target.parent.iterdir())) == 1


def test_weights_beside_the_model_go_along(
    pretend: Path, tiny_mindir: Path, tmp_path: Path
) -> None:
    pretend.write_text("#!/bin/sh\necho $6 >$5.ms; echo w >$5.msw; echo CONVERT RESULT SUCCESS:0\n")
    convert_to_ms(tiny_mindir, tmp_path / "out/a.ms", weight_fp16=True)
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert texts == {"a.ms": "float16\n", "a.msw": "w\n"}


def test_a_converter_that_hangs(
    pretend: Path, tiny_mindir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lite_release, "CONVERT_SECONDS", 0.3)
    pretend.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ArtifactError, match=r"timed out after 0\.3 s"):
        convert_to_ms(tiny_mindir, tmp_path / "out/a.ms", weight_fp16=False)


def test_errors_of_a_missing_converter(
    tiny_mindir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", sys.executable)
    with pytest.raises(EnvironmentFault, match="has no mindspore_lite") as caught:
        convert_to_ms(tiny_mindir, tmp_path / "a.ms", weight_fp16=False)
    assert "make lite" in caught.value.hint
    with pytest.raises(ArtifactError, match="no such file"):
        convert_to_ms(tmp_path / "none.mindir", tmp_path / "a.ms", weight_fp16=False)
    with pytest.raises(ArtifactError, match=r"ends in \.ms"):
        convert_to_ms(tiny_mindir, tmp_path / "a.mindir", weight_fp16=False)
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        convert_to_ms(tiny_mindir, tmp_path / "file/a.ms", weight_fp16=False)
