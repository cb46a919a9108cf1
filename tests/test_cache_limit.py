"""context.cache_limit: what a run removes of the cache once it is done, and tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.system.user_cache import cache_dir

HI = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")


def run(*words: str) -> None:
    assert main(list(words)) == 0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path / "cache"))


def old_entry(name: str) -> Path:
    folder = cache_dir() / name
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(bytes(2_000_000))
    os.utime(folder, times=(1_000_000_000,) * 2)
    return folder


def test_what_exceeds_the_limit_is_removed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    old = old_entry("graphs/old")
    other = old_entry("artifacts/other")
    run(*HI)
    run(*HI, "context.cache_limit=1GB")
    assert old.is_dir() and other.is_dir() and "cache_limit" not in capsys.readouterr().err
    run(*HI, "context.cache_limit=0.003GB")
    told = capsys.readouterr().err
    assert "removed from the cache, least recently used: artifacts/other (2.0 MB)" in told
    assert "context.cache_limit=0.003GB" in told
    assert old.is_dir() and not other.exists()


def test_an_export_that_the_run_uses_stays() -> None:
    offline = (*HI, "backend=mslite", "engine=graph-cell", "context.cache_limit=0.000001GB")
    run(*offline)
    (export,) = (cache_dir() / "artifacts").iterdir()
    os.utime(export, times=(1_000_000_000,) * 2)
    run(*offline)  # it is used again
    assert list((cache_dir() / "artifacts").iterdir()) == [export]
    assert export.stat().st_mtime > 1_000_000_000


@pytest.mark.parametrize("size", ["10", "0GB", "10MB", "-1GB"])
def test_a_size_that_is_none(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*HI, f"context.cache_limit={size}"]) == 2
    assert "context.cache_limit: got" in capsys.readouterr().err
