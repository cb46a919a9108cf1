"""MindIR -> .ms: with the true converter, and with converters that say one thing and do another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lite_runner.backends.engines import converter
from lite_runner.backends.engines.converter import convert_to_ms
from lite_runner.errors import ArtifactError, EnvironmentFault


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
    monkeypatch.setattr(converter, "CONVERT_SECONDS", 0.3)
    pretend.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ArtifactError, match=r"timed out after 0\.3 s"):
        convert_to_ms(tiny_mindir, tmp_path / "out/a.ms", weight_fp16=False)


def test_what_is_there_to_convert_with(
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
