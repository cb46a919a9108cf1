"""Values that are kept in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from lite_runner.system.user_cache import VALUES, cache_dir, remembered


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
