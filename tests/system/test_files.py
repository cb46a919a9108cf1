from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lite_runner.errors import EnvironmentFault
from lite_runner.system import files
from lite_runner.system.files import atomic_write, make_folder, new_folder, require_space

# Makes what its first argument names, below the second, says so, and waits to be killed.
CHILD = """
import sys, time
from pathlib import Path
from lite_runner.system.files import atomic_write, new_folder, temporary_folder
make, target = sys.argv[1], Path(sys.argv[2], "target")
context = {
    "temporary_folder": lambda: temporary_folder("any", target.parent),
    "atomic_write": lambda: atomic_write(target),
    "new_folder": lambda: new_folder(target),
}[make]()
with context as made:
    if make == "atomic_write":
        made.write(b"half")
        made.flush()
    else:
        (made / "file").write_text("half")
    print("made", flush=True)
    time.sleep(600)
"""


def orphaned(kind: str, folder: Path, *, kill: bool = True) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "made\n"
    if kill:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    return child


# Replaces the folder `set` by `other`, and is killed beside one of the system's renames.
SWAP = """
import os, shutil, signal, sys
from pathlib import Path
from lite_runner.system import files

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def rename(self, target, rename=Path.rename):
    rename(self, target)
    die()

def exchange(one, other, exchange=files._exchange):
    if sys.argv[1] == "before":
        die()
    done = exchange(one, other)
    if done:
        die()
    return done

files._exchange, Path.rename = exchange, rename
with files.new_folder(Path("set")) as fresh:
    shutil.copytree("other", fresh, dirs_exist_ok=True)
"""


@pytest.mark.parametrize(("when", "stands"), [("before", "set"), ("behind", "other")])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_killed_while_names_are_swapped(tmp_path: Path, when: str, stands: str, kind: str) -> None:
    """There is no moment in which neither stands there: two renames would have one."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other/name").write_text("other")
    old = tmp_path / "set"
    if kind == "folder":
        old.mkdir()
        old = old / "name"
    old.write_text("set")
    died = subprocess.run([sys.executable, "-c", SWAP, when], cwd=tmp_path)
    assert died.returncode == -signal.SIGKILL
    now = tmp_path / "set" if (tmp_path / "set").is_file() else tmp_path / "set/name"
    assert now.read_text() == stands


def age(folder: Path) -> None:
    then = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (then, then))


@pytest.mark.parametrize("kind", ["temporary_folder", "atomic_write", "new_folder"])
def test_what_a_killed_run_left_goes_with_the_next(kind: str, tmp_path: Path) -> None:
    orphaned(kind, tmp_path)
    (left,) = tmp_path.iterdir()
    files.remove_orphans(tmp_path)
    assert left.exists(), "as young as one that is being made"
    age(tmp_path)
    with new_folder(tmp_path / "other") as fresh:
        (fresh / "file").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("kind", ["temporary_folder", "atomic_write", "new_folder"])
def test_what_a_run_uses_stays(kind: str, tmp_path: Path) -> None:
    child = orphaned(kind, tmp_path, kill=False)
    try:
        age(tmp_path)
        with atomic_write(tmp_path / "other") as file:
            file.write(b"x")
        (used,) = tmp_path.glob(".*")
        assert used.exists()
    finally:
        orphan = child.stdout
        child.kill()
        child.wait()
        assert orphan is not None
        orphan.close()


def test_what_others_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".file.1.tmp", "file.lite_runner", ".other.partial"):
        (tmp_path / name).write_text("")
    (tmp_path / "outside").mkdir()
    (tmp_path / ".link.lite_runner").symlink_to(tmp_path / "outside")
    age(tmp_path)
    before = sorted(tmp_path.iterdir())
    files.remove_orphans(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / ".mine.lite_runner").mkdir()
    age(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    files.remove_orphans(tmp_path)
    assert (tmp_path / ".mine.lite_runner").exists()


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    for folder in ("link", "link/below"):
        with pytest.raises(EnvironmentFault, match="link is a link to gone, which does not exist"):
            make_folder(tmp_path / folder)
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


@pytest.mark.parametrize(
    ("free", "total", "expected"),
    [
        ((1 << 20) - 1, 1 << 30, "0 MiB free, 1 MiB needed"),
        (0, 0, "holds no files of users"),  # /sys, /proc
    ],
)
def test_too_little_space(
    free: int, total: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=total))
    with pytest.raises(EnvironmentFault, match=expected):
        require_space(tmp_path, 1 << 20)


def test_a_file_in_memory_is_for_other_processes_and_gone_after_it() -> None:
    with files.memory_file("plan", b"x" * 100_000) as path:
        for _ in range(2):
            shown = subprocess.run(["cat", path], capture_output=True, check=True)
            assert shown.stdout == b"x" * 100_000
        open_there = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, check=True)
        assert b"memfd:plan" not in open_there.stdout
    assert not path.exists()
