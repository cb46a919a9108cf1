"""run_lite.py verify RUN: the same bits again, or the differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from tests.paths import ROOT

TINY = ["model=tiny_llama", "load_checkpoint=random", "backend=native", "verbosity=0"]


def changed(change: Any) -> None:
    path = Path("outputs/latest/result.json")
    result = json.loads(path.read_text("utf-8"))
    change(result)
    path.write_text(json.dumps(result), "utf-8")


def test_a_run_that_samples(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict_data=[one,two]", "max_new_tokens=5", "do_sample=true", "logprobs=1"]
    assert main([*TINY, *words]) == 0
    capsys.readouterr()
    assert main(["verify", "outputs/latest"]) == 0
    stdout = capsys.readouterr().out
    assert "texts" in stdout and "2 of 2 the same, to the bit" in stdout
    assert "kernels" in stdout and "processor" in stdout and "(unchanged)" in stdout

    def change(result: dict[str, Any]) -> None:
        result["results"][1]["token_ids"][0] += 1
        result["versions"]["numpy"] = "0.1"

    changed(change)
    assert main(["verify", "outputs/latest"]) == 1
    captured = capsys.readouterr()
    assert "verify: 1 of 2 texts differ from those of" in captured.err and "text 1" in captured.err
    assert "was 0.1" in captured.out


def test_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Some words, and others. " * 4)
    assert main([*TINY, "run_mode=eval", "eval_data=text.txt"]) == 0
    assert main(["verify", "outputs/latest"]) == 0
    assert "1 of 1 the same" in capsys.readouterr().out
    data = ROOT / "tests/fixtures/evaluation/data"
    assert main([*TINY, "run_mode=eval", "eval.tasks=lambada", f"eval.data={data}"]) == 0
    assert main(["verify", "outputs/latest"]) == 0
    assert "5 of 5 the same" in capsys.readouterr().out


def test_runs_that_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/result.json").write_text("{}")
    (tmp_path / "run/config.yaml").write_text("run_mode: bench\n")
    of_tasks = {"results": [], "backend": "native", "engine": "none", "versions": {}, "tasks": {}}
    for name, result in (("empty", {}), ("tasks", of_tasks)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("run_mode: eval\n")
        (tmp_path / name / "result.json").write_text(json.dumps(result))
    for words, code, expected in (
        ([], 2, "verify: got 0 words, expected the folder of a run"),
        (["--help"], 2, "verify: got --help, expected the folder of a run"),
        (["~no_such_user/x"], 2, "verify: ~no_such_user/x: there is no such user"),
        (["empty"], 2, "empty/result.json is not the result of a run"),
        (["tasks"], 2, "tasks has no samples.jsonl"),
        (["missing"], 4, "result.json: cannot be read"),
        (["run"], 2, "is a run of run_mode=bench, which computes no tokens"),
    ):
        assert main(["verify", *words]) == code
        assert expected in capsys.readouterr().err
