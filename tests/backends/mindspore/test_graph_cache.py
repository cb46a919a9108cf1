"""Compiled graphs across processes: MindSpore keeps them for a whole process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def predict(cli: Cli, tmp_path: Path) -> Callable[..., tuple[Any, str]]:
    """Run a tiny model with a cache of its own; gives result.json and standard error."""

    def predict(*overrides: str) -> tuple[Any, str]:
        options = ["model=tiny_llama", "predict_data=some words", "max_new_tokens=6"]
        options += ["backend=ms", *overrides]
        options += ["model.model_config.num_layers=1"]
        done = cli(*options, env={"LITE_RUNNER_CACHE": str(tmp_path / "cache")})
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "outputs/latest/result.json").read_text("utf-8")), done.stderr

    return predict


def graphs(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "graphs").rglob("*.mindir"))


def test_graphs_are_kept_and_compiled_again_where_they_have_to_be(
    predict: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    first, told = predict()
    assert "compile the prefill graph" in told and "compile the decode graph" in told
    assert len(graphs(tmp_path)) == 2
    (entry,) = (tmp_path / "cache/graphs").iterdir()
    os.utime(entry, times=(1_000_000_000,) * 2)
    second, told = predict()
    assert "compile the" not in told
    assert second["results"] == first["results"]
    assert entry.stat().st_mtime > 1_000_000_000  # noted as used

    decode = graphs(tmp_path)[1]
    content = bytearray(decode.read_bytes())
    content[len(content) // 2] ^= 0x40
    decode.chmod(0o600)
    decode.write_bytes(content)
    third, told = predict()
    assert "compile the decode graph" in told and "compile the prefill graph" not in told
    assert third["results"] == first["results"]
    assert decode.read_bytes() != content

    _, told = predict("predict_data=['one','two']")  # other shapes
    assert "compile the decode graph" in told
    assert len(graphs(tmp_path)) == 4


def test_scoring_has_a_graph_of_its_own(
    predict: Callable[..., tuple[Any, str]], tmp_path: Path
) -> None:
    """Neither purpose is served the other's, whichever came first."""
    (tmp_path / "text.txt").write_text("some words of a text")
    score = ["run_mode=eval", "eval_data=text.txt", "predict_data=", "max_new_tokens=null"]
    first, told = predict(*score)
    assert "compile the score graph" in told and len(graphs(tmp_path)) == 1
    _, told = predict()
    assert "compile the prefill graph" in told and len(graphs(tmp_path)) == 3
    second, told = predict(*score)
    assert "compile the" not in told
    assert second["evaluation"]["perplexity"] == first["evaluation"]["perplexity"]


def test_other_code_compiles_its_own(tmp_path: Path) -> None:
    """A module that was not there when the graphs were kept: in a copy of this project."""
    copy = tmp_path / "copy"
    unused = shutil.ignore_patterns("__pycache__")
    for folder in ("lite_runner", "conf"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=unused)
    shutil.copy(ROOT / "run_lite.py", copy)

    def told() -> str:
        options = ["model=tiny_llama", "predict_data=some words", "max_new_tokens=2", "backend=ms"]
        done = subprocess.run(
            [sys.executable, "run_lite.py", *options],
            cwd=copy,
            env=os.environ | {"LITE_RUNNER_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            encoding="utf-8",
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "compile the" in told()
    (copy / "lite_runner/architectures/of_tomorrow.py").touch()
    assert "compile the" in told()
    assert "compile the" not in told()
