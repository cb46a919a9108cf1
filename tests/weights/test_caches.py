"""Cache entries that are trimmed, and those that are not."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lite_runner.weights.caches import trim, use
from tests.paths import ROOT

NAMES = ("graphs/new", "artifacts/old", "graphs/oldest", "artifacts/newest")
USER = """
import sys, time
from pathlib import Path
from lite_runner.weights.caches import use
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
