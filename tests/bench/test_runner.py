"""The processes of cells, by stand-ins that measure nothing; test_cell.py has real ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.grid import Settings
from lite_runner.bench.report import Cell, Measured
from lite_runner.bench.runner import run_cells
from lite_runner.system import own_process

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


def run(*cells: Settings) -> list[Cell]:
    told = {"config": {"quant": None}, "plugins": ("own.py",), "warmup": 0, "repeat": 2}
    return list(run_cells([CellJob(settings=one, **told) for one in cells], context=256))


def test_what_a_process_measures_is_kept(
    settings: Callable[..., Settings], measured: Callable[..., Measured], stand_in: StandIn
) -> None:
    answer = measured([1.0, 2.0])
    stand_in(
        "assert (job['config'], job['plugins']) == ({'quant': None}, ['own.py']), job\n"
        "assert (job['settings']['batch'], job['warmup'], job['repeat']) == (4, 0, 2), job\n"
        f"print({json.dumps({'measured': asdict(answer)})!r})"
    )
    (cell,) = run(settings(batch=4))
    assert cell.error is None
    assert (cell.settings.batch, cell.measured) == (4, answer)
    assert cell.busy_cores >= 0


def test_one_that_fails_does_not_keep_the_others(
    settings: Callable[..., Settings],
    measured: Callable[..., Measured],
    stand_in: StandIn,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stand_in(
        "batch = job['settings']['batch']\n"
        "if batch == 2: sys.exit('a library broke')\n"
        "if batch == 3: os.kill(os.getpid(), 9)\n"
        "found = {'error': 'no memory'} if batch == 1 else "
        f"json.loads({json.dumps({'measured': asdict(measured([1]))})!r})\n"
        "print(json.dumps(found))"
    )
    cells = run(*(settings(batch=batch) for batch in (1, 2, 3, 4)), settings(prompt=512))
    assert cells[0].error == "no memory"
    assert cells[1].error == "its process ended with 1: a library broke"
    assert "its process ended with -9" in (cells[2].error or "")
    assert cells[3].measured and cells[3].error is None
    assert cells[4].left_out == "544 tokens do not fit the model's context of 256"
    said = capfd.readouterr().err
    assert "batch 1, new 32, prompt 128: failed: no memory" in said
    assert "batch 4, new 32, prompt 128: prefill 1.00 tokens/s" in said


def test_a_process_that_exported_first_is_followed_by_one_that_measures(
    settings: Callable[..., Settings],
    measured: Callable[..., Measured],
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    stand_in(
        f"import pathlib\nfile = pathlib.Path({str(tmp_path / 'exported')!r})\n"
        f"answer = {json.dumps({'measured': asdict(measured([1]))})!r}\n"
        "print(answer if file.exists() else json.dumps({'again': True}))\nfile.touch()"
    )
    assert run(settings())[0].measured is not None
    stand_in("print(json.dumps({'again': True}))")
    assert run(settings())[0].error == "the exported model was gone again"


def test_ctrl_c_ends_the_process_of_the_cell(
    settings: Callable[..., Settings], stand_in: StandIn, tmp_path: Path
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
        run(settings())
    presser.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_process_that_was_interrupted_interrupts_the_run(
    settings: Callable[..., Settings], stand_in: StandIn
) -> None:
    stand_in("sys.exit(130)")
    with pytest.raises(KeyboardInterrupt):
        run(settings())
