"""What was measured as a Markdown table, aligned so that it reads well in a terminal, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lite_runner.bench.grid import SIZES, shared, varying
from lite_runner.bench.report import FIGURES, Cell, Ratio, Report
from lite_runner.bench.spread import Spread, number

BUSY = 0.1  # cores of other programs, from which on figures are doubtful


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table without a newline at its end; behind the first `left` columns all are
    aligned right."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(padded)} |"

    rule = ("-" * width + ("-" if i < left else ":") for i, width in enumerate(widths))
    return "\n".join([line(head), f"|-{'|-'.join(rule)}|", *map(line, rows)])


def with_spread(spread: Spread) -> str:
    """The median, and half of the range in percent of it, e.g. `71.7 ±1%`."""
    if len(spread.values) < 2 or not spread.median:
        return number(spread.median)
    return f"{number(spread.median)} ±{100 * spread.half_range / spread.median:.0f}%"


def table(report: Report) -> str:
    """A row a cell, a column a figure; in brackets the ratio to the former run."""
    settings = [cell.settings for cell in report.cells]
    axes = [axis for axis in varying(settings) if axis not in SIZES]
    engines = len({cell.measured.engine for cell in report.cells if cell.measured}) > 1
    units = (f"{figure.name}, {figure.unit}" for figure in FIGURES.values())
    head = [*axes, *(["engine"] if engines else []), *SIZES, *units]
    ratios = [None] * len(settings) if report.comparison is None else report.comparison.ratios
    reasons, rows = _reasons(report), []
    for cell, ratio in zip(report.cells, ratios, strict=True):
        row = [cell.shown(axis) for axis in axes]
        if engines:
            row.append(cell.measured.engine if cell.measured else "")
        row += [cell.shown(axis) for axis in SIZES]
        if cell.measured is None:
            place = reasons.index(_reason(cell)) + 1
            said = f"{'failed' if cell.error else 'left out'} ({place})"
            row += [said, *[""] * (len(FIGURES) - 1)]
        else:
            row += _figures(cell, ratio)
        rows.append(row)
    return markdown(head, rows, left=len(axes) + engines)


def document(report: Report, model: str) -> str:
    """All of bench.md: the table, and what it was measured on and with."""
    machine = report.machine
    memory = f"{machine.memory_mib / 1024:.0f} GiB"
    lines = [
        f"# {model}",
        "",
        f"{machine.processor}, {machine.cores} cores, {memory}. {_in_common(report)}",
        "",
        table(report),
        "",
        *_notes(report),
    ]
    return "\n".join(lines) + "\n"


def _figures(cell: Cell, ratios: Mapping[str, Ratio] | None) -> list[str]:
    assert cell.measured is not None
    found = []
    for key in FIGURES:
        text = with_spread(cell.measured.figures[key])
        if ratios is not None:
            text += f" ({'~' if ratios[key].overlap else ''}{ratios[key].ratio:.2f})"
        found.append(text)
    return found


def _in_common(report: Report) -> str:
    """Of all cells, less what stands in a column."""
    measured = [cell.measured for cell in report.cells if cell.measured is not None]
    said = [
        f"{axis} {value}"
        for axis, value in shared([cell.settings for cell in report.cells]).items()
        if axis not in (*SIZES, "quant") and value != 0
    ]
    for name, values in (
        ("quant", {one.quant for one in measured}),
        ("engine", {one.engine for one in measured}),
    ):
        said += [f"{name} {value}" for value in values if len(values) == 1]
    said = [f"{'; '.join(said)}."] if said else []
    times = "repetition" if report.repeat == 1 else "repetitions"
    counted = f"{report.repeat} {times} after {report.warmup} that are not counted."
    return " ".join([*said, counted])


def _notes(report: Report) -> list[str]:
    notes = []
    if report.repeat > 1:
        notes.append("Medians; ± is half of the range over repetitions.")
    if report.comparison is not None:
        notes.append(
            f"In brackets: the ratio to {report.comparison.model} in"
            f" {Path(report.comparison.run).parent}, with ~ where the ranges overlap."
        )
    busy = [cell.busy_cores for cell in report.cells if cell.busy_cores > BUSY]
    if busy:
        cells = "1 cell" if len(busy) == 1 else f"{len(busy)} cells"
        notes.append(
            f"Doubtful: other programs kept up to {max(busy):.1f} cores busy during {cells}."
        )
    text = [" ".join(notes)] if notes else []
    listed = [f"{place}. {said}" for place, said in enumerate(_reasons(report), 1)]
    return [*text, *(["", *listed] if listed else [])]


def _reasons(report: Report) -> list[str]:
    """Why cells have no figures, each reason once."""
    return list(dict.fromkeys(_reason(cell) for cell in report.cells if cell.measured is None))


def _reason(cell: Cell) -> str:
    return " ".join((cell.error or cell.left_out or "").split())
