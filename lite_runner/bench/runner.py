"""Starts the processes of cells, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.grid import why_left_out
from lite_runner.bench.machine import Others
from lite_runner.bench.report import FIGURES, Cell, Measured
from lite_runner.bench.spread import number
from lite_runner.errors import EXIT_INTERRUPTED
from lite_runner.system import memory

COMMAND = (sys.executable, "-m", "lite_runner.bench.cell")
GRACE_S = 10.0  # for a cell to end by itself, and the processes of its engine with it
_PACKAGE = Path(__file__).resolve().parent.parent
_TAIL = 300  # characters of what a process that crashed said last


def run_cells(jobs: Sequence[CellJob], context: int) -> Iterator[Cell]:
    """Measure cells, each when it is asked for.

    `context`: the model's positions. A cell that fails has an error, and the next one follows;
    KeyboardInterrupt ends the one that is being measured.
    """
    with progress.step("bench", len(jobs), "cells") as step:
        for number_, job in enumerate(jobs, 1):
            progress.status(f"cell {number_} of {len(jobs)}: {job.settings}")
            if why := why_left_out(job.settings, context):
                cell = Cell(settings=job.settings, left_out=why)
            else:
                cell = _measured(job)
            progress.note(_line(cell))
            step.advance()
            yield cell


def _measured(job: CellJob) -> Cell:
    others = Others()
    answer = _answer(job)
    if "again" in answer:  # the model was exported first, for this cell and later ones
        others = Others()
        answer = _answer(job)
    busy = round(others.busy_cores(), 2)
    if "measured" not in answer:
        error = answer.get("error", "the exported model was gone again")
        return Cell(settings=job.settings, error=error, busy_cores=busy)
    measured = Measured.from_json(answer["measured"])
    return Cell(settings=job.settings, measured=measured, busy_cores=busy)


def _answer(job: CellJob) -> dict[str, Any]:
    """What the process of a cell says."""
    path = [str(_PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    kills = memory.oom_kills()
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, said = process.communicate(json.dumps(job.to_json()))
    finally:
        _end(process)
    if process.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode:
        why = memory.killed(process.returncode, kills) or said.strip()[-_TAIL:]
        return {"error": f"its process ended with {process.returncode}: {why}".rstrip(": ")}
    answer: dict[str, Any] = json.loads(out)
    return answer


def _end(process: subprocess.Popen[str]) -> None:
    """Let nothing of a cell go on that was interrupted."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _line(cell: Cell) -> str:
    if cell.measured is None:
        return f"{cell.settings}: " + (
            f"failed: {cell.error}" if cell.error else f"left out: {cell.left_out}"
        )
    shown = (
        f"{FIGURES[key].name} {number(cell.measured.figures[key].median)} {FIGURES[key].unit}"
        for key in ("prefill_tok_s", "decode_tok_s")
    )
    return f"{cell.settings}: {', '.join(shown)}"
