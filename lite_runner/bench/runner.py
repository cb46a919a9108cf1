"""Starts the processes of cells, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lite_runner import progress
from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.grid import why_left_out
from lite_runner.bench.machine import Others
from lite_runner.bench.report import FIGURES, Cell, Measured
from lite_runner.bench.spread import number
from lite_runner.system import own_process

PROGRAM = "lite_runner.bench.cell"


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
    answer = own_process.ask(PROGRAM, job.to_json())
    if "again" in answer:  # the model was exported first, for this cell and later ones
        others = Others()
        answer = own_process.ask(PROGRAM, job.to_json())
    busy = round(others.busy_cores(), 2)
    if "measured" not in answer:
        error = answer.get("error", "the exported model was gone again")
        return Cell(settings=job.settings, error=error, busy_cores=busy)
    measured = Measured.from_json(answer["measured"])
    return Cell(settings=job.settings, measured=measured, busy_cores=busy)


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
