"""Memory and disks that are not as a run needs them."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from lite_runner.doctor import child, hardware
from lite_runner.doctor.check import Check
from lite_runner.system import environment, memory


def test_this_machine_has_a_processor_and_memory() -> None:
    assert hardware.cpu().status == "ok"
    assert f" of {os.cpu_count()} cores" in hardware.cpu().found
    assert hardware.main_memory().status == "ok"


def test_too_little_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    found = hardware.main_memory()
    assert found.status == "fail"
    assert found.found.startswith("MindSpore alone needs 461.4 MB")
    assert "10.5 MB is free" in found.found
    assert found.remedy


def test_too_few_addresses_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_addresses", lambda: 1 << 30)
    found = hardware.main_memory()
    assert found.status == "fail"
    assert "ulimit -v leaves 1.1 GB" in found.found
    assert "ulimit -v unlimited" in found.remedy


def test_a_limit_of_addresses_that_suffices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_addresses", lambda: 64 << 30)
    assert hardware.main_memory().found.endswith("ulimit -v leaves 68.7 GB of address space")


def test_no_ascend_device_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 0)
    assert hardware.ascend().status == "ok"


def test_ascend_devices_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 8)
    monkeypatch.setattr(child, "ask", lambda question, timeout: "Ascend910B3")
    assert hardware.ascend().found == "8 x Ascend910B3"


def test_ascend_devices_without_cann_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 8)
    found = Check("ascend", hardware.ascend).finding()
    assert found.status == "fail"
    assert "CANN cannot be loaded" in found.found
    assert "set_env.sh" in found.remedy


def test_an_output_folder_is_not_made(tmp_path: Path) -> None:
    found = hardware.output_disk(tmp_path / "a" / "b")
    assert found.status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_written_fails() -> None:
    found = hardware.output_disk(Path("/proc/self/outputs"))
    assert found.status == "fail"
    assert "/proc/self/outputs: cannot be written: " in found.found
    assert found.remedy.startswith("output_dir=")


def test_a_file_in_the_way_fails(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("")
    found = hardware.output_disk(tmp_path / "outputs" / "more")
    assert found.status == "fail"
    assert found.found.endswith(f"{tmp_path}/outputs is a file")


def test_a_link_to_nowhere_fails(tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(tmp_path / "gone")
    found = hardware.output_disk(tmp_path / "outputs")
    assert found.status == "fail"
    assert f"is a link to {tmp_path}/gone, which does not exist" in found.found


def test_a_folder_called_latest_fails(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    found = hardware.output_disk(tmp_path)
    assert found.status == "fail"
    assert found.remedy == f"mv {tmp_path}/latest {tmp_path}/latest-old"


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hardware.shutil, "disk_usage", lambda place: usage(10, 5, 5 * 10**6))
    found = hardware.output_disk(tmp_path)
    assert (found.status, found.expected) == ("warn", "1.0 GB")
    assert "5.0 MB free" in found.found


def test_a_cache_that_cannot_be_written_is_a_warning() -> None:
    found = hardware.cache_disk(Path("/proc/self/cache"))
    assert found.status == "warn"
    assert "LITE_RUNNER_CACHE" in found.remedy


def test_a_folder_that_cannot_be_looked_at_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    found = Check("disk", lambda: hardware.output_disk(Path("/closed"))).finding()
    assert found.status == "fail"
    assert "Permission denied" in found.found
