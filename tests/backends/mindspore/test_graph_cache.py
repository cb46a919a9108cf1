"""Compiled graphs across processes: MindSpore keeps them for a whole process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lite_runner.backends.mindspore import graph_cache
from lite_runner.backends.mindspore.graph_cache import GraphCache
from tests.forks import forks
from tests.paths import ROOT


@pytest.fixture
def predict(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, str]]]:
    """Run a tiny model in a process and with a cache of its own; gives result.json and standard
    error."""

    def predict(*overrides: str) -> tuple[Any, str]:
        options = ["model=tiny_llama", "predict_data=some words", "max_new_tokens=6"]
        options += ["backend=ms", *overrides]
        options += ["model.model_config.num_layers=1"]
        done = started.run(*options, LITE_RUNNER_CACHE=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "outputs/latest/result.json").read_text("utf-8")), done.stderr

    with forks(tmp_path) as started:
        yield predict


def graphs(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "graphs").rglob("*.mindir"))


def test_graphs_are_cached_and_recompiled_when_necessary(
    predict: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    """Scoring has a graph of its own: neither purpose is served the other's, whichever came
    first."""
    (tmp_path / "text.txt").write_text("some words of a text")
    score = ["run_mode=eval", "eval_data=text.txt", "predict_data=", "max_new_tokens=null"]
    _, stderr = predict(*score)
    assert "compile the score graph" in stderr and len(graphs(tmp_path)) == 1
    (of_scores,) = (tmp_path / "cache/graphs").iterdir()

    first, stderr = predict()
    assert "compile the prefill graph" in stderr and "compile the decode graph" in stderr
    assert len(graphs(tmp_path)) == 3
    (entry,) = set((tmp_path / "cache/graphs").iterdir()) - {of_scores}
    os.utime(entry, times=(1_000_000_000,) * 2)
    second, stderr = predict()
    assert "compile the" not in stderr
    assert second["results"] == first["results"]
    assert entry.stat().st_mtime > 1_000_000_000  # noted as used

    decode = sorted(entry.rglob("*.mindir"))[1]
    content = bytearray(decode.read_bytes())
    content[len(content) // 2] ^= 0x40
    decode.chmod(0o600)
    decode.write_bytes(content)
    third, stderr = predict()
    assert "compile the decode graph" in stderr and "compile the prefill graph" not in stderr
    assert third["results"] == first["results"]
    assert decode.read_bytes() != content

    _, stderr = predict("predict_data=['one','two']")  # other shapes
    assert "compile the decode graph" in stderr
    assert len(graphs(tmp_path)) == 5


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process whose first backend has not come yet, with a cache of its own."""
    monkeypatch.setenv("LITE_RUNNER_CACHE", str(tmp_path))
    monkeypatch.setattr(graph_cache, "_program", lambda: ROOT / "run_lite.py")
    monkeypatch.setattr(graph_cache, "_claimed", False)


@pytest.mark.usefixtures("own_cache")
def test_the_first_purpose_of_the_first_backend_is_cached_alone(tmp_path: Path) -> None:
    """MindSpore has one folder for a process, and numbers the graphs in it."""
    first, second = GraphCache({"layers": 1}), GraphCache({"layers": 2})
    for cache, purpose, folders in ((second, "score", 0), (first, "score", 1), (first, "other", 1)):
        with cache.entry(purpose) as cached:
            assert not cached
        assert len(list((tmp_path / "graphs").glob("*"))) == folders


@pytest.mark.usefixtures("own_cache")
def test_other_code_compiles_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(code: str) -> bool:
        """True if the first backend of a process finds a graph; it leaves one."""
        monkeypatch.setattr(graph_cache, "_claimed", False)
        monkeypatch.setattr(graph_cache, "code_digest", lambda: code)
        cache = GraphCache({"layers": 1})
        with cache.entry() as found:
            if not found:
                graph = cache._folder / "rank_0/graph_cache/compile_cache_0.mindir"
                graph.parent.mkdir(parents=True)
                graph.write_bytes(b"a graph")
        return found

    assert [kept(code) for code in ("old", "old", "new", "new", "old")] == [
        *(False, True, False, True, True)
    ]
