"""A benchmark: validated before it starts, measured cell by cell, reported."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.bench.charts import check_available, figures_chart, ratios_chart
from lite_runner.bench.options import BenchOptions, CellJob, CellSettings, from_plain, skip_reason
from lite_runner.bench.report import (
    FIGURES,
    Cell,
    Machine,
    Measured,
    Report,
    check_comparable,
    compared,
    document,
    number,
    read_former,
)
from lite_runner.errors import ConfigError
from lite_runner.output import RunFolder
from lite_runner.system import environment, own_process

PROGRAM = "lite_runner.bench.cell"


def check(options: BenchOptions, context: int) -> None:
    """Check early for errors that would come after hours, for a model of `context` positions.

    Raises ConfigError where no cell can be measured or none can be compared, EnvironmentFault where
    charts cannot be drawn.
    """
    cells = list(options.cells())
    measured = [cell for cell in cells if not skip_reason(cell, context)]
    if not measured:
        reasons = dict.fromkeys(skip_reason(cell, context) for cell in cells)
        raise ConfigError(
            f"bench: no cell is left to measure: {'; '.join(reasons)}",
            "choose others with bench.prompt=, bench.new=, bench.batch= and bench.adapters=",
        )
    if options.charts:
        check_available()
    if options.compare:
        check_comparable(measured, read_former(options.compare))


def described(options: BenchOptions, context: int) -> list[str]:
    """A line per cell: its settings, or the reason why it is left out."""
    return [_described(cell, context) for cell in options.cells()]


def run(
    options: BenchOptions, jobs: Sequence[CellJob], *, context: int, keep: Callable[[Report], None]
) -> Report:
    """Measure the cells of these `jobs`, in processes of their own.

    `keep` is given all there is after every cell. Ctrl-C ends it with the cells that are done, or
    is raised where there are none.
    """
    former = read_former(options.compare) if options.compare else None
    machine = this_machine()
    report = Report(machine=machine, warmup=options.warmup, repeat=options.repeat, cells=())
    try:
        for cell in run_cells(jobs, context):
            cells = (*report.cells, cell)
            comparison = None if former is None else compared(cells, former)
            report = replace(report, cells=cells, comparison=comparison)
            keep(report)
    except KeyboardInterrupt:
        if not report.cells:
            raise
        report = replace(report, interrupted=True)
        keep(report)
    return report


def write(report: Report, model: str, folder: RunFolder, *, charts: bool) -> str:
    """Write bench.md and the charts into a run's folder; gives the text of bench.md."""
    text = document(report, model)
    folder.write_text("bench.md", text)
    if charts and any(cell.measured for cell in report.cells):
        drawings = {"bench": figures_chart(report, model), "compare": ratios_chart(report, model)}
        for name, drawing in drawings.items():
            if drawing is not None:
                folder.write_bytes(f"{name}.png", drawing.png)
                folder.write_bytes(f"{name}.svg", drawing.svg)
    return text


def _described(cell: CellSettings, context: int) -> str:
    why = skip_reason(cell, context)
    return f"{cell}: left out, {why}" if why else str(cell)


def run_cells(jobs: Sequence[CellJob], context: int) -> Iterator[Cell]:
    """Measure cells, each when it is asked for.

    `context`: the model's positions. A cell that fails has an error, and the next one follows;
    KeyboardInterrupt ends the one that is being measured.
    """
    described: set[str] = set()  # backends
    with progress.step("bench", len(jobs), "cells") as step:
        for place, job in enumerate(jobs, 1):
            progress.status(f"cell {place} of {len(jobs)}: {job.settings}")
            if why := skip_reason(job.settings, context):
                cell = Cell(settings=job.settings, left_out=why)
            else:
                cell, backend = _measured(job)
                if backend and backend not in described:
                    progress.note(backend)
                    described.add(backend)
            progress.note(_line(cell))
            step.advance()
            yield cell


def _measured(job: CellJob) -> tuple[Cell, str]:
    """The measured cell, and its backend with the reason; "" if it failed."""
    others = Others()
    answer = own_process.ask(PROGRAM, job.to_json())
    if "again" in answer:  # the model was exported first, for this cell and later ones
        others = Others()
        answer = own_process.ask(PROGRAM, job.to_json())
    busy = round(others.busy_cores(), 2)
    if "measured" not in answer:
        error = answer.get("error", "the exported model was removed again")
        return Cell(settings=job.settings, error=error, busy_cores=busy), ""
    measured = from_plain(Measured, answer["measured"])
    for line in answer.get("table", ()):
        progress.note(line)
    cell = Cell(
        settings=job.settings, measured=measured, busy_cores=busy, profile=answer.get("profile")
    )
    return cell, answer["backend"]


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


def this_machine() -> Machine:
    """The processor, and the share that this process may use."""
    import psutil  # type: ignore[import-untyped]

    return Machine(
        processor=environment.processor(),
        cores=environment.cores(),
        memory_mib=psutil.virtual_memory().total >> 20,
    )


class Others:
    """CPU load of programs other than this one and its children."""

    def __init__(self) -> None:
        self._started, self._before = time.monotonic(), _foreign_seconds()

    def busy_cores(self) -> float:
        """Cores that they kept busy since, on average; own children count once they have ended."""
        seconds = time.monotonic() - self._started
        return max(0.0, _foreign_seconds() - self._before) / max(seconds, 1e-9)


def _foreign_seconds() -> float:
    """CPU seconds since boot that were neither idle nor spent by this process and its children."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in usages)
