"""A whole benchmark: checked before it begins, kept cell by cell, and written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lite_runner.bench.cell_job import jobs_of
from lite_runner.bench.chart import check_available
from lite_runner.bench.charts import figures_chart, ratios_chart
from lite_runner.bench.compare import check_comparable, compared, read_former
from lite_runner.bench.grid import Settings, why_left_out
from lite_runner.bench.machine import this_machine
from lite_runner.bench.options import BenchOptions, CellOptions
from lite_runner.bench.report import Report
from lite_runner.bench.runner import run_cells
from lite_runner.bench.table import document
from lite_runner.errors import ConfigError
from lite_runner.output.report import RunFolder


def check(options: BenchOptions, context: int) -> None:
    """Find what would fail after hours, for a model of `context` positions.

    Raises ConfigError where no cell can be measured or none can be compared, EnvironmentFault where
    charts cannot be drawn.
    """
    cells = list(options.grid.cells())
    measured = [cell for cell in cells if not why_left_out(cell, context)]
    if not measured:
        reasons = dict.fromkeys(why_left_out(cell, context) for cell in cells)
        raise ConfigError(
            f"bench: no cell is left to measure: {'; '.join(reasons)}",
            "choose others with bench.prompt=, bench.new=, bench.batch= and bench.adapters=",
        )
    if options.charts:
        check_available()
    if options.compare:
        check_comparable(measured, read_former(options.compare))


def described(options: BenchOptions, context: int) -> list[str]:
    """A line a cell: what would be measured, or why not."""
    return [_described(cell, context) for cell in options.grid.cells()]


def run(
    options: BenchOptions,
    config: CellOptions,
    *,
    context: int,
    keep: Callable[[Report], None],
) -> Report:
    """Measure the cells of a run with this `config`, in processes of their own.

    `keep` is given all there is after every cell. Ctrl-C ends it with the cells that are done, or
    is raised where there are none.
    """
    former = read_former(options.compare) if options.compare else None
    machine = this_machine()
    report = Report(machine=machine, warmup=options.warmup, repeat=options.repeat, cells=())
    try:
        for cell in run_cells(jobs_of(options, config), context):
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
        drawings = {
            "bench": figures_chart(report, model),
            "compare": ratios_chart(report, model),
        }
        for name, drawing in drawings.items():
            if drawing is not None:
                folder.write_bytes(f"{name}.png", drawing.png)
                folder.write_bytes(f"{name}.svg", drawing.svg)
    return text


def _described(cell: Settings, context: int) -> str:
    why = why_left_out(cell, context)
    return f"{cell}: left out, {why}" if why else str(cell)
