"""Exports by the real MindFormers: their graphs run in MindSpore Lite, and give its tokens."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.backends.mindformers import run as module
from lite_runner.mindir.manifest import read_manifest
from tests.refusals import refused

WEIGHTS = ["load_checkpoint=random", "weights_seed=3"]
EXPORT = [
    *("run_mode=export", "backend=mindformers", *WEIGHTS),
    *("model.model_config.use_past=false", "infer.infer_seq_length=32"),
]
PREDICT = ["predict_data=['some words','abc','x']", "max_new_tokens=6", *WEIGHTS]


@pytest.fixture(autouse=True)
def pythons(monkeypatch: pytest.MonkeyPatch, lite_python: Path, mindformers_python: Path) -> None:
    monkeypatch.setenv("LITE_RUNNER_LITE_PYTHON", str(lite_python))
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(mindformers_python))


@pytest.mark.parametrize(("model", "rows"), [("tiny_bloom", 1), ("tiny_qwen2", 2)])
def test_its_graph_gives_its_tokens(model: str, rows: int) -> None:
    """Those of MindFormers' process are what an export is verified with: see below."""
    batch = f"predict_batch_size={rows}"
    folder = Path("an export")  # MindSpore takes no spaces
    assert main([*EXPORT, f"model={model}", batch, f"export_output={folder}"]) == 0
    manifest = read_manifest(folder)
    assert (manifest.layout, manifest.batch_size, manifest.seq_length) == ("no_cache", rows, 32)
    assert manifest.versions["mindformers"] == "1.0.2"
    assert manifest.versions["mindspore"] == "2.0.0"
    assert stat.S_IMODE((folder / "model.mindir").stat().st_mode) == 0o644
    run = [*PREDICT, f"model={model}", batch, "backend=mslite", f"infer.model_dir={folder}"]
    assert main([*run, "compare_backend=native", "compare_tolerance=0.005"]) == 0
    result: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    mslite, theirs = result["comparison"]["sides"]
    assert (mslite["engine"], theirs["backend"]) == ("lite-worker", "native")
    assert all(text["equal"] == text["tokens"] for text in result["comparison"]["texts"])


def test_an_export_that_computes_something_else_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = module.write_checkpoint

    def wrong(files: Any, release: Any, folder: Path) -> Path:
        return right(replace(files, seed=4), release, folder)

    monkeypatch.setattr(module, "write_checkpoint", wrong)
    assert main([*EXPORT, "model=tiny_bloom", "export_output=x"]) == 4
    assert "differs in lite-worker" in capsys.readouterr().err
    assert not Path("x").exists()


def test_models_without_a_graph_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["model=tiny_gpt2"], "MindSpore Lite does not run the mask of its exported GPT-2"),
        (["model=tiny_qwen2", "mindformers.release=1.9.0"], "it has no exporter"),
    ):
        refused([*EXPORT, *words], 2)
        assert expected in capsys.readouterr().err


def test_dry_run_shows_the_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXPORT, "model=tiny_bloom", "dry_run=true"]) == 0
    stdout = capsys.readouterr().out
    assert "tiny_bloom_no_cache_s32: no_cache, mindir, verified in lite-worker" in stdout
    assert "use_past: false" in stdout and "seq_length: 32" in stdout
