"""What scripts for MindFormers import besides models."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from lite_runner import get_last_checkpoint, get_real_rank, logger, progress, str2bool
from lite_runner.errors import ArtifactError, ConfigError


def test_str2bool() -> None:
    assert [str2bool(text) for text in ("True", "1", "yes", "false", "NO", "0")] == [
        *(True, True, True, False, False, False)
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="got 'maybe', expected True or False"):
        str2bool("maybe")


def test_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK_ID", raising=False)
    assert get_real_rank() == 0
    monkeypatch.setenv("RANK_ID", "3")
    assert get_real_rank() == 3
    monkeypatch.setenv("RANK_ID", "-1")
    with pytest.raises(ConfigError, match="RANK_ID: got '-1'"):
        get_real_rank()


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no checkpoint"):
        get_last_checkpoint(tmp_path)
    with pytest.raises(ArtifactError, match="no such folder"):
        get_last_checkpoint(tmp_path / "rank_0")
    for name, age in (("b.ckpt", 30), ("a.safetensors", 10), ("c.ckpt", 20), ("d.txt", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (10_000 - age, 10_000 - age))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "a.safetensors")
    os.utime(tmp_path / "c.ckpt", (9_990, 9_990))
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "c.ckpt")


def test_the_logger_says_its_lines_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("ckpt path: %s", "a.ckpt")
    logger.debug("not this")
    progress.configure(0)
    logger.warning("nor this")
    progress.configure(1)
    assert capsys.readouterr() == ("", "ckpt path: a.ckpt\n")
