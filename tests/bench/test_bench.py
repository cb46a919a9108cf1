from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lite_runner.bench import bench
from lite_runner.bench.options import BenchOptions, CellOptions
from lite_runner.bench.report import Cell, Measured, Report
from lite_runner.errors import ConfigError
from lite_runner.output.report import RunFolder

Options = Callable[..., BenchOptions]
MeasuredOf = Callable[..., Measured]


@pytest.fixture
def options() -> Options:
    def make(**changes: Any) -> BenchOptions:
        sizes = {"batch": (1, 8), "prompt": (128, 512), "new": 32, "adapters": 0}
        left_open = {"threads": None, "quant": None, "backend": None}
        counts = {"warmup": 0, "repeat": 2, "charts": True, "compare": ""}
        return BenchOptions(**{**sizes, **left_open, **counts, **changes})

    return make


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, measured: MeasuredOf) -> list[int]:
    """Batches at which Ctrl-C comes; other cells are done at once."""
    interrupts: list[int] = []

    def run(job: Any) -> Cell:
        if job.settings.batch in interrupts:
            raise KeyboardInterrupt
        return Cell(settings=job.settings, measured=measured([1.0, 2.0]))

    monkeypatch.setattr("lite_runner.bench.runner._measured", run)
    return interrupts


def run(options: BenchOptions, config: CellOptions, kept: list[Report]) -> Report:
    bench.check(options, context=256)
    return bench.run(options, config, context=256, keep=kept.append)


def test_everything_is_kept_after_every_cell_and_written(
    options: Options, config: CellOptions, processes: list[int], tmp_path: Path
) -> None:
    kept: list[Report] = []
    found = run(options(), config, kept)
    assert [len(report.cells) for report in kept] == [1, 2, 3, 4] and kept[-1] == found
    assert [bool(cell.left_out) for cell in found.cells] == [False, False, True, True]
    text = bench.write(found, "tiny", RunFolder(tmp_path), charts=True)
    assert (tmp_path / "bench.md").read_text() == text and text.startswith("# tiny")
    assert {file.name for file in tmp_path.iterdir()} == {"bench.md", "bench.png", "bench.svg"}

    (tmp_path / "result.json").write_text(json.dumps({"model": "tiny", "bench": found.to_json()}))
    again = run(options(compare=str(tmp_path)), config, [])
    assert again.comparison is not None
    bench.write(again, "tiny", RunFolder(tmp_path), charts=True)
    assert (tmp_path / "compare.png").exists() and (tmp_path / "compare.svg").exists()


def test_without_charts_there_is_the_table_alone(
    options: Options,
    config: CellOptions,
    processes: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "check_available", lambda: pytest.fail("nothing is drawn"))
    bench.write(run(options(charts=False), config, []), "tiny", RunFolder(tmp_path), charts=False)
    assert [file.name for file in tmp_path.iterdir()] == ["bench.md"]


def test_ctrl_c_keeps_what_is_done(
    options: Options, config: CellOptions, processes: list[int]
) -> None:
    processes.append(8)
    kept: list[Report] = []
    found = run(options(), config, kept)
    assert found.interrupted and len(found.cells) == 1 and kept[-1] == found
    processes.append(1)
    with pytest.raises(KeyboardInterrupt):
        run(options(), config, [])


def test_a_grid_that_fits_nowhere_is_refused_before_it_starts(options: Options) -> None:
    with pytest.raises(ConfigError, match="no cell is left to measure: 544 tokens do not fit"):
        bench.check(options(prompt=512), context=256)


def test_the_plan_names_every_cell(options: Options) -> None:
    assert bench.described(options(batch=1), context=256) == [
        "batch 1, new 32, prompt 128",
        "batch 1, new 32, prompt 512: left out, 544 tokens do not fit the model's context of 256",
    ]


def test_a_benchmark_in_which_all_cells_fail_has_a_table(
    options: Options, tmp_path: Path, report: Callable[..., Report]
) -> None:
    cells = (Cell(settings=one, error="no memory") for one in options().grid.cells())
    text = bench.write(report(*cells), "tiny", RunFolder(tmp_path), charts=True)
    assert text.count("failed (1)") == 4
    assert not (tmp_path / "bench.png").exists()
