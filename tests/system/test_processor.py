"""What is known of a processor."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from lite_runner.system import processor


def test_one_of_intel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor\t: 0\nmodel name\t: Xeon 6\nflags\t\t: fpu avx avx2 avx512_vnni\n\n"
        "processor\t: 1\nmodel name\t: other\nflags\t\t: sve\n"
    )
    monkeypatch.setattr(processor, "_INFO", info)
    assert processor.name() == "Xeon 6"
    assert processor.features() == ["avx2", "avx512_vnni"]


def test_one_of_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n")
    monkeypatch.setattr(processor, "_INFO", info)
    assert processor.name() == platform.machine()
    assert processor.features() == ["asimddp", "i8mm"]


def test_one_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_INFO", Path("/nowhere"))
    assert (processor.name(), processor.features()) == (platform.machine(), [])
    assert processor.cores() == len(os.sched_getaffinity(0))
