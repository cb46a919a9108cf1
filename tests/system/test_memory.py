"""Limits of memory, and the failures that are a lack of it."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.errors import EXIT_ENVIRONMENT
from lite_runner.system import memory
from tests.each import each

V2 = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 500\nfile 200\n"}
V1 = {
    "memory.limit_in_bytes": "1000\n",
    "memory.usage_in_bytes": "700\n",
    "memory.stat": "cache 1\ntotal_cache 200\ntotal_shmem 50\n",
}


def write(folder: Path, files: dict[str, str], **changes: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(changes.get(name.split(".")[1], content))


def test_a_containers_limit_counts(mount: Path) -> None:
    machine = memory.free_memory()
    assert machine > 10**6
    write(mount, V2)  # as it looks from within a container
    assert memory.free_memory() == 500
    write(mount, V2, max="max\n")
    assert memory.free_memory() > 10**6


def test_the_tightest_limit_above_counts(mount: Path) -> None:
    write(mount / "job/step", V2, max="max\n")
    write(mount / "job", V2)
    write(mount / "other", V2, max="800\n")
    assert memory.free_memory() == 500
    write(mount / "job/step", V2, max="900\n")
    assert memory.free_memory() == 400
    write(mount / "job/step", V2, max="600\n", stat="file 0\n")
    assert memory.free_memory() == 0


def test_limits_of_the_first_version(mount: Path) -> None:
    write(mount / "memory/job/step", V1, limit_in_bytes="9223372036854771712\n")
    assert memory.free_memory() > 10**6
    write(mount / "memory/job", V1)
    assert memory.free_memory() == 450  # pages of files are given back, those of tmpfs are not


def test_processes_that_were_killed_are_counted(mount: Path) -> None:
    assert memory.oom_kills() == 0
    write(mount / "job", {"memory.events": "oom 3\noom_kill 2\n"})
    assert memory.oom_kills() == 2
    assert "its cgroup counts" in memory.killed(-signal.SIGKILL, 1)
    assert "most likely" in memory.killed(-signal.SIGKILL, 2)
    assert memory.killed(-signal.SIGTERM, 1) == memory.killed(1, 1) == memory.killed(None, 1) == ""
    write(mount / "memory/job", {"memory.oom_control": "under_oom 0\noom_kill 5\n"})
    assert memory.oom_kills() == 5


def test_ulimit_leaves_so_much() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert memory.free_addresses() is None
    program = "from lite_runner.system import memory; print(memory.free_addresses())"
    limited = f"ulimit -v 1000000; exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", limited], capture_output=True, text=True)
    assert 500 * 10**6 < int(done.stdout) < 1024 * 10**6, done.stderr


MINDSPORE = """
----------------------------------------------------
- Memory not enough:
----------------------------------------------------
Memory isn't enough and alloc failed, kernel name: 0_Default/Custom-op0, alloc size: 131072B.
"""


@each(
    ("error", "message"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("Unable to allocate 3.00 GiB for an array"), "Unable to allocate 3.00 GiB"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (RuntimeError(MINDSPORE), "not enough memory: Memory isn't enough and alloc failed"),
        (RuntimeError("Allocate memory failed, size: 8"), "Allocate memory failed"),
        (RuntimeError("Malloc device memory failed"), "Malloc device memory failed"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ImportError("libx.so: failed to map segment from shared object"), "failed to map segment"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
)
def test_failures_for_want_of_memory(error: Exception, message: str) -> None:
    fault = memory.shortage_error(error)
    assert fault is not None and fault.exit_code == EXIT_ENVIRONMENT
    assert message in fault.message and "dry_run=true" in fault.hint
    wrapped = ValueError("the graph cannot be run")
    wrapped.__cause__ = error
    found = memory.shortage_error(wrapped)
    assert found is not None and message in found.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the shapes [2] and [3] do not fit"),
        ValueError("out of memory"),
        OSError(2, "No such file or directory"),
        RuntimeError("a tensor in device memory has no allocation"),
    ],
)
def test_other_failures_are_unchanged(error: Exception) -> None:
    assert memory.shortage_error(error) is None


def test_a_peak_is_not_that_of_the_parent_process() -> None:
    inner = "from lite_runner.system import memory; print(memory.peak())"
    outer = (
        "import subprocess, sys; large = b'x' * 300_000_000; "
        f"sys.exit(subprocess.call([sys.executable, '-c', {inner!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True)
    assert 0 < int(done.stdout) < 200_000_000, done.stderr


def test_a_forgotten_peak_counts_from_now_on() -> None:
    """In a process of its own: this one's peak is other tests'."""
    code = (
        "from lite_runner.system import memory\n"
        "taken = bytearray(256 << 20)\n"
        "before = memory.peak()\n"
        "taken.clear()\n"
        "memory.forget_peak()\n"
        "print(before - memory.peak())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 200 << 20


def test_malloc_limits_are_those_of_the_remaining_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainings in threads of a program end in any order."""
    limits: dict[int, int] = {}

    class Libc:
        def mallopt(self, which: int, value: int) -> int:
            limits[which] = value
            return 1

    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Libc())
    trim, threshold = -1, -3
    first, second = memory.freed_blocks_kept(), memory.freed_blocks_kept()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert limits == {trim: 2**31 - 1, threshold: 2**31 - 1}
    with memory.large_blocks_returned():
        assert limits == {trim: 8 << 20, threshold: 4 << 20}
    assert limits == {trim: 2**31 - 1, threshold: 2**31 - 1}
    second.__exit__(None, None, None)
    assert limits == {trim: 64 << 20, threshold: 32 << 20}
    for name, own in (  # a user's own stay
        ("MALLOC_TRIM_THRESHOLD_", "100000"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=100000"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, own)
            with memory.freed_blocks_kept():
                assert limits == {trim: 64 << 20, threshold: 32 << 20}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # is no limit
    with memory.freed_blocks_kept():
        assert limits == {trim: 2**31 - 1, threshold: 2**31 - 1}
