"""Values that are kept in the user's cache."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lite_runner.system import user_cache
from lite_runner.system.files import cache_dir, make_folder, sha256_of
from lite_runner.system.user_cache import VALUES, digest_of, remembered


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
