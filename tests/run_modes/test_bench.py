"""run_mode=bench as a user runs it, on model=tiny_llama."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.bench.options import CellJob
from lite_runner.bench.report import Cell

Run = Callable[..., dict[str, Any]]
SMALL = ("run_mode=bench", "model=tiny_llama", "bench.prompt=8", "bench.new=3", "bench.repeat=2")
ONE = (*SMALL, "bench.batch=1", "bench.charts=false")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The error of a command line that ends with this exit code."""
    assert main([*arguments]) == code
    return capsys.readouterr().err


def test_a_grid_is_measured_reported_and_compared(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = run(*SMALL, "bench.batch=[1,2]", "bench.adapters=[0,2]", "context.threads=2")
    out, err = capsys.readouterr()
    assert err.count("backend=native: lite-runner's own kernels") == 1
    folder = Path("outputs/latest").resolve()
    assert out == (folder / "bench.md").read_text() and out.startswith("# tiny_llama\n")
    assert result["run_mode"] == "bench" and result["engine"].startswith("native, ")
    assert (result["results"], result["load_checkpoint"]) == ([], "random")
    cells = result["bench"]["cells"]
    assert [(one["settings"]["adapters"], one["settings"]["batch"]) for one in cells] == [
        *((0, 1), (0, 2), (2, 1), (2, 2))
    ]
    assert cells[2]["left_out"] == "a batch of 1 cannot mix 2 adapters"
    for one in (cells[0], cells[1], cells[3]):
        assert one["error"] is None
        assert len(one["measured"]["figures"]["decode_tok_s"]["values"]) == 2
    assert {"bench.png", "bench.svg"} <= {file.name for file in folder.iterdir()}
    assert (folder / "bench.png").read_bytes()[:4] == b"\x89PNG"

    again = run(*ONE, "quant=a16w8", "bench.compare=outputs/latest")
    assert again["bench"]["cells"][0]["measured"]["quant"] == "a16w8"
    assert again["bench"]["comparison"]["run"] == str(folder / "result.json")
    assert again["bench"]["comparison"]["ratios"][0]["peak_mib"]["ratio"] > 0


def test_dry_run_names_every_cell(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "bench.prompt=[8,300]", "bench.charts=false", "dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run mode      bench" and lines[4].startswith("checkpoint    random")
    assert lines[7:] == [
        "batch 1, new 3, prompt 8",
        "batch 8, new 3, prompt 8",
        "batch 1, new 3, prompt 300: left out, 303 tokens do not fit the model's context of 256",
        "batch 8, new 3, prompt 300: left out, 303 tokens do not fit the model's context of 256",
    ]
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.new=1"], "bench.new: got 1, expected"),
        (["bench.batch=[]"], "bench.batch: got [], expected at least one value"),
        (["parallel=tp2"], "use_parallel=true has no effect with run_mode=bench"),
        (["engine=lite", "backend=ms"], "engine has an effect only with backend=mslite"),
        (["predict_data=hi"], "predict_data has no effect with run_mode=bench"),
        (
            ["bench.quant=[a16w4,a16w8]", "bench.backend=mslite", "engine=lite"],
            "quant=a16w4 is not available with backend=mslite",
        ),
        (["bench.prompt=300"], "bench: no cell is left to measure: 303 tokens do not fit"),
        (["bench.compare=none"], "bench.compare: none: No such file or directory"),
    ],
)
def test_unmeasurable_cells_are_refused(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, *ONE, *arguments)


def test_errors_of_cells_are_reported_in_their_rows(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["bench.quant=[none,a16w9]", "bench.backend=[ms,mslite]"]
    assert "bench.quant" in refused(capsys, *ONE, *grid)
    grid = ["bench.quant=[none,a16w8]", "backend=mslite", "bench.backend=[ms,mslite]"]
    assert refused(capsys, *ONE, *grid, "engine=lite", "dry_run=true", code=0) == ""


def test_a_cell_that_fails_fails_the_run_when_all_is_written(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(job: CellJob) -> tuple[Cell, str]:
        return Cell(settings=job.settings, error="no memory"), ""

    monkeypatch.setattr("lite_runner.bench.bench._measured", measured)
    error = refused(capsys, *ONE, code=1)
    assert "error: 1 of 1 cells failed" in error and "bench.md says why" in error
    result = json.loads(Path("outputs/latest/result.json").read_text())
    assert (result["engine"], result["bench"]["cells"][0]["error"]) == ("none", "no memory")
    assert "no memory" in Path("outputs/latest/bench.md").read_text()


def test_ctrl_c_leaves_the_cells_before_it(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(job: CellJob) -> tuple[Cell, str]:
        if job.settings.batch == 2:
            raise KeyboardInterrupt
        return Cell(settings=job.settings, error="no memory"), ""

    monkeypatch.setattr("lite_runner.bench.bench._measured", measured)
    assert "interrupted" in refused(capsys, *ONE, "bench.batch=[1,2]", code=130)
    result = json.loads(Path("outputs/latest/result.json").read_text())
    assert result["bench"]["interrupted"] and len(result["bench"]["cells"]) == 1


def test_cells_get_the_settings_of_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[CellJob] = []

    def measured(job: CellJob) -> tuple[Cell, str]:
        jobs.append(CellJob.from_json(json.loads(json.dumps(job.to_json()))))
        return Cell(settings=job.settings, error="")

    monkeypatch.setattr("lite_runner.bench.bench._measured", measured)
    monkeypatch.setattr("lite_runner.plugins._registered", ["/own.py"])
    monkeypatch.setenv("KEY", "0123456789abcdef")
    main([*ONE, "backend=mslite", "infer.enc_key=env:KEY", "bench.threads=3", "kv_cache=fp16"])
    assert jobs[0].plugins == ("/own.py",)
    config = jobs[0].config
    assert (config["infer"]["enc_key"], config["kv_cache"]) == ("env:KEY", "fp16")
    assert (config["backend"], config["context"]["threads"]) == ("mslite", 3)
