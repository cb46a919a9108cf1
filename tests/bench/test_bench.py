from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lite_runner.bench import bench
from lite_runner.bench.bench import Others, run_cells, this_machine
from lite_runner.bench.options import BenchOptions, CellJob, CellOptions, CellSettings
from lite_runner.bench.report import Cell, Measured, Report
from lite_runner.errors import ConfigError
from lite_runner.output import RunFolder
from lite_runner.run_modes.bench import jobs_of
from lite_runner.system import own_process

Options = Callable[..., BenchOptions]
MeasuredOf = Callable[..., Measured]


@pytest.fixture
def options() -> Options:
    def make(**changes: Any) -> BenchOptions:
        sizes = {"batch": (1, 8), "prompt": (128, 512), "new": 32, "adapters": 0}
        unset = {"threads": None, "quant": None, "backend": None}
        counts = {"warmup": 0, "repeat": 2, "charts": True, "compare": ""}
        return BenchOptions(**{**sizes, **unset, **counts, **changes})

    return make


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, measured: MeasuredOf) -> list[int]:
    """Batches at which Ctrl-C comes; other cells are done at once."""
    interrupts: list[int] = []

    def measure(job: Any) -> tuple[Cell, str]:
        if job.settings.batch in interrupts:
            raise KeyboardInterrupt
        return Cell(settings=job.settings, measured=measured([1.0, 2.0])), "backend=native: fast"

    monkeypatch.setattr("lite_runner.bench.bench._measured", measure)
    return interrupts


def run(options: BenchOptions, config: CellOptions, kept: list[Report]) -> Report:
    bench.check(options, context=256)
    return bench.run(options, jobs_of(options, config), context=256, keep=kept.append)


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
    cells = (Cell(settings=one, error="no memory") for one in options().cells())
    text = bench.write(report(*cells), "tiny", RunFolder(tmp_path), charts=True)
    assert text.count("failed (1)") == 4
    assert not (tmp_path / "bench.png").exists()


StandIn = Callable[[str], None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """`stand_in(code)`: a cell's process runs this, with the job as `job`."""

    def use(code: str) -> None:
        start = "import json, os, sys, time\njob = json.load(sys.stdin)\n"
        monkeypatch.setattr(
            own_process, "command", lambda module: (sys.executable, "-c", start + code)
        )

    return use


def measured_cells(*cells: CellSettings) -> list[Cell]:
    common = {"config": {"quant": None}, "plugins": ("own.py",), "warmup": 0, "repeat": 2}
    return list(run_cells([CellJob(settings=one, **common) for one in cells], context=256))


def test_measurements_of_a_process_are_kept(
    settings: Callable[..., CellSettings], measured: Callable[..., Measured], stand_in: StandIn
) -> None:
    answer = measured([1.0, 2.0])
    stand_in(
        "assert (job['config'], job['plugins']) == ({'quant': None}, ['own.py']), job\n"
        "assert (job['settings']['batch'], job['warmup'], job['repeat']) == (4, 0, 2), job\n"
        f"print({json.dumps({'measured': asdict(answer), 'backend': 'ms'})!r})"
    )
    (cell,) = measured_cells(settings(batch=4))
    assert cell.error is None
    assert (cell.settings.batch, cell.measured) == (4, answer)
    assert cell.busy_cores >= 0


def test_one_that_fails_does_not_keep_the_others(
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    stand_in: StandIn,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in(
        "batch = job['settings']['batch']\n"
        "if batch == 2: sys.exit('a library broke')\n"
        "if batch == 3: os.kill(os.getpid(), 9)\n"
        "found = {'error': 'no memory'} if batch == 1 else "
        f"json.loads({json.dumps({'measured': asdict(measured([1])), 'backend': 'ms'})!r})\n"
        "print(json.dumps(found))"
    )
    cells = measured_cells(*(settings(batch=batch) for batch in (1, 2, 3, 4)), settings(prompt=512))
    assert cells[0].error == "no memory"
    assert cells[1].error == "its process ended with 1: a library broke"
    assert "its process ended with -9" in (cells[2].error or "")
    assert cells[3].measured and cells[3].error is None
    assert cells[4].left_out == "544 tokens do not fit the model's context of 256"
    stderr = capfd.readouterr().err
    assert "batch 1, new 32, prompt 128: failed: no memory" in stderr
    assert "\nms\nbatch 4, new 32, prompt 128: prefill 1.00 tokens/s" in stderr


def test_a_process_that_exported_first_is_followed_by_one_that_measures(
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    stand_in(
        f"import pathlib\nfile = pathlib.Path({str(tmp_path / 'exported')!r})\n"
        f"answer = {json.dumps({'measured': asdict(measured([1])), 'backend': 'ms'})!r}\n"
        "print(answer if file.exists() else json.dumps({'again': True}))\nfile.touch()"
    )
    assert measured_cells(settings())[0].measured is not None
    stand_in("print(json.dumps({'again': True}))")
    assert measured_cells(settings())[0].error == "the exported model was removed again"


def test_ctrl_c_ends_the_process_of_the_cell(
    settings: Callable[..., CellSettings], stand_in: StandIn, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    stand_in(f"open({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")

    def press() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        measured_cells(settings())
    presser.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_process_that_was_interrupted_interrupts_the_run(
    settings: Callable[..., CellSettings], stand_in: StandIn
) -> None:
    stand_in("sys.exit(130)")
    with pytest.raises(KeyboardInterrupt):
        measured_cells(settings())


def test_the_machine_has_a_name_cores_and_memory() -> None:
    machine = this_machine()
    assert machine.processor and machine.memory_mib > 0
    assert machine.cores == len(os.sched_getaffinity(0))


def test_time_of_ended_children_is_not_of_others() -> None:
    others = Others()
    spin = "import time\nwhile time.process_time() < 1.5: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    mine = others.busy_cores()
    spinning = subprocess.Popen([sys.executable, "-c", spin.replace("1.5", "600")])
    try:
        others = Others()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1.5)"], check=True)
        busy = others.busy_cores()  # of one that goes on, which is not counted yet
    finally:
        spinning.kill()
        spinning.wait()
    assert 0 <= mine < len(os.sched_getaffinity(0))
    assert busy > 0.2
