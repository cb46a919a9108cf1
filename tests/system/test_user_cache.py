"""Values that are kept in the user's cache."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lite_runner.system import user_cache
from lite_runner.system.files import cache_dir, make_folder, sha256_of
from lite_runner.system.user_cache import (
    VALUES,
    digest_of,
    known_of_file,
    of_file,
    remembered,
    trim,
    use,
)
from tests.paths import ROOT


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()


def failing() -> None:
    pytest.fail("made again")


def test_a_value_is_made_once_for_a_state() -> None:
    value = {"a": [1, 2.5, None, "文"], "b": {"c": True}}
    assert remembered("one", "s", lambda: value) == value
    assert remembered("one", "s", failing) == value
    assert remembered("two", "s", lambda: 2) == 2
    assert remembered("one", "t", lambda: 3) == 3
    assert remembered("one", "t", failing) == 3
    assert len(list((cache_dir() / VALUES).iterdir())) == 2  # the newest of each name


def test_a_new_cache_is_its_owners(tmp_path: Path) -> None:
    cache_dir().rmdir()
    before = os.umask(0o022)
    try:
        make_folder(cache_dir() / "pypi/one")
        make_folder(tmp_path / "out/inner")
    finally:
        os.umask(before)
    assert cache_dir().stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "one", "state": "s"}', b"\xff"])
def test_a_broken_file_is_made_anew(content: bytes) -> None:
    remembered("one", "s", lambda: 1)
    (file,) = (cache_dir() / VALUES).iterdir()
    file.write_bytes(content)
    assert remembered("one", "s", lambda: 2) == 2
    assert remembered("one", "s", failing) == 2


def test_without_a_cache_it_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "other"))
    assert [remembered("one", "s", lambda n=n: n) for n in (1, 2)] == [1, 2]
    assert not (tmp_path / "other").exists()  # made by those who download or export
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / VALUES).touch()
    assert [remembered("one", "s", lambda n=n: n) for n in (1, 2)] == [1, 2]


def test_an_edited_value_is_made_anew() -> None:
    remembered("one", "s", lambda: {"penalty": 1.0})
    (file,) = (cache_dir() / VALUES).iterdir()
    file.write_text(file.read_text().replace("1.0", "9.0"))
    assert remembered("one", "s", lambda: {"penalty": 1.0}) == {"penalty": 1.0}


def test_a_large_file_is_read_once_for_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def counted(path: Path) -> str:
        read.append(path)
        return sha256_of(path)

    monkeypatch.setattr(user_cache, "sha256_of", counted)
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()
    assert [digest_of(file) for _ in range(2)] == [digest] * 2 and len(read) == 2  # a small one
    monkeypatch.setattr(user_cache, "LARGE", 1)
    assert [digest_of(file) for _ in range(2)] == [digest] * 2 and len(read) == 4  # a young one
    monkeypatch.setattr(user_cache, "_SETTLED_NS", 0)
    assert [digest_of(file) for _ in range(3)] == [digest] * 3 and len(read) == 5
    before = file.stat()
    file.write_bytes(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of(file) == hashlib.sha256(b"abd").hexdigest()
    monkeypatch.setattr(user_cache, "_SETTLED_NS", 100_000_000)
    file.write_bytes(b"abe")
    known_of_file("parts", file, [1, 2])
    user_cache._found.clear()  # as in another process
    assert of_file("parts", file, failing) == [1, 2]
    file.write_bytes(b"abf")
    assert of_file("parts", file, lambda: [3]) == [3]


NAMES = ("graphs/new", "artifacts/old", "graphs/oldest", "artifacts/newest")
USER = """
import sys, time
from pathlib import Path
from lite_runner.system.user_cache import use
print(use(Path(sys.argv[1])), flush=True)
time.sleep(600)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with four entries of 100,000 bytes, and a download of as many."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(cache))
    for name, age in zip((*NAMES, "hub/download"), (20, 30, 40, 10, 90), strict=True):
        folder = cache / name
        (folder / "inner").mkdir(parents=True)
        (folder / "inner/file").write_bytes(bytes(100_000))
        os.utime(folder, times=(time.time() - age,) * 2)
    return cache


def left(cache: Path) -> set[str]:
    return {name for name in NAMES if (cache / name).is_dir()}


def test_the_least_recently_used_go_first(cache: Path) -> None:
    assert trim(400_000, math.inf) == {}
    assert trim(399_999, math.inf) == {"graphs/oldest": 100_000}
    assert trim(150_000, math.inf) == {"artifacts/old": 100_000, "graphs/new": 100_000}
    assert left(cache) == {"artifacts/newest"}
    assert trim(0, math.inf) == {"artifacts/newest": 100_000}
    assert (cache / "hub/download/inner/file").is_file()
    assert [list((cache / name).iterdir()) for name in ("graphs", "artifacts")] == [[], []]


def test_recently_used_entries_are_not_trimmed(cache: Path) -> None:
    assert trim(0, time.time() - 25).keys() == {"graphs/oldest", "artifacts/old"}
    assert left(cache) == {"graphs/new", "artifacts/newest"}


def test_a_use_makes_an_entry_the_newest(cache: Path) -> None:
    assert use(cache / "graphs/oldest")
    assert not use(cache / "graphs/missing")
    assert time.time() - (cache / "graphs/oldest").stat().st_mtime < 10
    assert trim(0, math.inf).keys() == set(NAMES) - {"graphs/oldest"}  # this process has it


def test_an_entry_in_use_is_not_trimmed_until_its_process_ends(cache: Path) -> None:
    command = [sys.executable, "-c", USER, str(cache / "graphs/oldest")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as user:
        assert user.stdout is not None and user.stdout.readline() == "True\n"
        assert "graphs/oldest" not in trim(0, math.inf)
        assert left(cache) == {"graphs/oldest"}
        user.kill()
        user.wait()
        assert trim(0, math.inf).keys() == {"graphs/oldest"}


def test_a_link_is_left_alone(cache: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (cache / "artifacts/newest").rename(mine)
    (cache / "artifacts/newest").symlink_to(mine)
    assert "artifacts/newest" not in trim(0, math.inf)
    assert (mine / "inner/file").is_file()
