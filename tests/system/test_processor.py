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


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("cpu_", "cpu.")).write_text(content)


def test_version_2(mount: Path) -> None:
    assert processor.cpu_quota() is None
    write(mount / "job/step", cpu_max="max 100000\n")
    assert processor.cpu_quota() is None
    write(mount / "other", cpu_max="10000 100000\n")
    write(mount / "job", cpu_max="250000 100000\n")  # a parent's limit counts too
    assert processor.cpu_quota() == 2.5
    write(mount / "job/step", cpu_max="75000 50000\n")
    assert processor.cpu_quota() == 1.5


def test_version_1(mount: Path) -> None:
    write(mount / "cpu/job/step", cpu_cfs_quota_us="-1\n", cpu_cfs_period_us="100000\n")
    assert processor.cpu_quota() is None
    write(mount / "cpu", cpu_cfs_quota_us="300000\n", cpu_cfs_period_us="100000\n")
    assert processor.cpu_quota() == 3


def test_as_many_threads_as_whole_cpus(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    expected = {"max": 8, "1600000": 8, "250000": 2, "100000": 1, "5000": 1}
    for quota, cores in expected.items():
        write(mount, cpu_max=f"{quota} 100000\n")
        assert processor.cores() == cores, quota
