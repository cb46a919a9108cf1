"""run_mode=bench: speed and memory of a model over a grid of settings, a process a cell."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lite_runner import progress
from lite_runner.bench import bench
from lite_runner.bench.options import BenchOptions, CellJob, CellOptions
from lite_runner.bench.report import Report
from lite_runner.config import Invalid
from lite_runner.config.checks import offline_errors, strategy_errors
from lite_runner.errors import RunnerError
from lite_runner.model.locate import locate_for_plan
from lite_runner.output import Result, RunFolder, Timing
from lite_runner.plan import Plan
from lite_runner.plugins import registered
from lite_runner.records import dataclass
from lite_runner.sizing import model_lines
from lite_runner.system import environment
from lite_runner.system.signals import CutShort


@dataclass(frozen=True, kw_only=True)
class Config(CellOptions):
    """run_mode=bench"""

    bench: BenchOptions


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of a benchmark."""
    yield from strategy_errors(config)
    cells = [config.of_cell(settings) for settings in config.bench.cells()]
    found = [list(cell.cell_errors()) for cell in cells]
    if all(found):  # errors of only some cells are reported when these fail
        yield from chain.from_iterable(found)
    if all(not cell.in_lite for cell in cells):
        yield from offline_errors(config)


def plan(config: Config) -> Plan:
    """The checkpoint and the cells. Without dry_run it is fetched, and the cells find it in the
    cache. Raises RunnerError."""
    device = environment.resolve_device(config.context.device_target, planned=config.dry_run)
    files = locate_for_plan(config.source)
    context = files.model.seq_length
    bench.check(config.bench, context)
    lines = model_lines(config.run_mode, config.model_name, files.model, files.location())
    lines |= {"device": device, "output": config.output_dir}
    table = tuple(bench.described(config.bench, context))
    return Plan(config=config, device=device, files=files, lines=lines, table=table)


def run(plan: Plan, folder: RunFolder) -> None:
    """Measure every cell, print and write the figures. Raises RunnerError where cells failed;
    CutShort after Ctrl-C, when the finished cells have been written."""
    config, files = plan.config, plan.model
    assert isinstance(config, Config)

    def keep(report: Report) -> None:
        folder.write_result(_result(plan, report))

    context, jobs = files.model.seq_length, jobs_of(config.bench, config)
    report = bench.run(config.bench, jobs, context=context, keep=keep)
    progress.text(bench.write(report, config.model_name, folder, charts=config.bench.charts))
    progress.note(f"results in {folder.path}")
    if report.interrupted:
        raise CutShort
    if report.failed:
        raise RunnerError(
            f"{report.failed} of {len(report.cells)} cells failed",
            f"{folder.path / 'bench.md'} says why",
        )


def jobs_of(grid: BenchOptions, config: CellOptions) -> list[CellJob]:
    return [
        CellJob(
            config=config.of_cell(settings).to_dict(),
            plugins=tuple(registered()),
            settings=settings,
            warmup=grid.warmup,
            repeat=grid.repeat,
        )
        for settings in grid.cells()
    ]


def _result(plan: Plan, report: Report) -> Result:
    engines = dict.fromkeys(cell.measured.engine for cell in report.cells if cell.measured)
    engine = ", ".join(engines) or "none"
    return Result.of(
        plan, plan.model.source, engine=engine, bench=report.to_json(), timing=Timing()
    )
