"""The charts of a benchmark: its figures over the axis that varies most, and ratios to a former
run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lite_runner.bench.chart import (
    COLORS,
    GRID,
    MARKERS,
    SETTINGS,
    TEXT,
    Drawing,
    Line,
    Panel,
    draw,
    empty,
    finished,
    plain,
)
from lite_runner.bench.grid import SIZES, Settings, varying
from lite_runner.bench.report import FIGURES, Cell, Report

DRAWN = (
    *("prefill_tok_s", "decode_tok_s", "peak_mib"),
    *("first_token_ms", "token_ms_p50", "token_ms_p99"),
)
X_LABELS = {
    "batch": "batch, rows",
    "prompt": "prompt, tokens",
    "new": "new tokens",
    "threads": "threads",
    "adapters": "adapters in the batch",
    "quant": "quant",
    "backend": "backend",
}
NUMBERS = ("batch", "prompt", "threads", "new", "adapters")  # axes that can be one of a chart
ROW_INCHES = 0.6  # of a cell in the chart of ratios


def figures_chart(report: Report, model: str) -> Drawing:
    """Every figure of DRAWN in a panel of its own, over one axis; a line for each combination of
    the others."""
    cells = [cell for cell in report.cells if cell.measured is not None]
    settings = [cell.settings for cell in cells]
    axis = _along(settings)
    others = [name for name in varying(settings) if name != axis]
    panels = [_panel(key, cells, axis, others) for key in DRAWN]
    times = "1 repetition" if report.repeat == 1 else f"{report.repeat} repetitions"
    spread = "" if report.repeat == 1 else "median and range of "
    return draw(panels, f"{model} on {report.machine.processor}: {spread}{times}")


def ratios_chart(report: Report, model: str) -> Drawing | None:
    """The ratio of every cell to its counterpart: one panel where more is better, one where less
    is. None where no cell has a counterpart."""
    import matplotlib as mpl

    comparison = report.comparison
    if comparison is None or not any(comparison.ratios):
        return None
    pairs = zip(report.cells, comparison.ratios, strict=True)
    found = [(cell, ratios) for cell, ratios in pairs if ratios is not None]
    labels = _labels([cell for cell, _ in found])
    names = [FIGURES[key].name for key in DRAWN]
    former = f"{comparison.model} in {Path(comparison.run).parent.name}"
    with mpl.rc_context(SETTINGS):
        size = 11, 1.6 + ROW_INCHES * max(3, len(found))
        figure = empty(size)
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, more in ((left, True), (right, False)):
            keys = [key for key in DRAWN if FIGURES[key].more_is_better is more]
            for place, key in enumerate(keys):
                index = DRAWN.index(key)
                offset = (place - (len(keys) - 1) / 2) * 0.7 / len(keys)
                ratios = [one[key] for _, one in found]
                axes.errorbar(
                    [one.ratio for one in ratios],
                    [row + offset for row in range(len(found))],
                    xerr=[
                        [one.ratio - one.low for one in ratios],
                        [one.high - one.ratio for one in ratios],
                    ],
                    label=names[index],
                    color=COLORS[index % len(COLORS)],
                    marker=MARKERS[index % len(MARKERS)],
                    linestyle="none",
                    markersize=5,
                    capsize=3,
                )
            plain(axes)
            axes.grid(axis="x", color=GRID, linewidth=0.8)
            axes.axvline(1, color=TEXT, linewidth=1)
            axes.set_title(
                f"{'more' if more else 'less'} is better",
                fontsize=10,
                fontweight="bold",
                loc="left",
            )
            axes.set_xlabel("ratio to the former run")
        left.set_yticks(range(len(found)), labels)
        left.set_ylim(len(found) - 0.5, -0.5)
        left.set_ylabel("cell")
        return finished(figure, f"{model}: ratios to {former}", names)


def _along(cells: Sequence[Settings]) -> str:
    """The axis to draw along: the number with the most values, else a setting that varies."""
    counts = {axis: len({getattr(cell, axis) for cell in cells}) for axis in (*NUMBERS, *X_LABELS)}
    best = max(NUMBERS, key=lambda axis: counts[axis])
    if counts[best] > 1:
        return best
    return max(X_LABELS, key=lambda axis: counts[axis])


def _panel(key: str, cells: Sequence[Cell], axis: str, others: Sequence[str]) -> Panel:
    figure = FIGURES[key]
    lines: dict[str, Line] = {}
    for cell in cells:
        assert cell.measured is not None
        name = ", ".join(f"{other} {cell.shown(other)}" for other in others)
        x = getattr(cell.settings, axis)
        point = (x if isinstance(x, int) else cell.shown(axis), cell.measured.figures[key])
        points = lines[name].points if name in lines else ()
        lines[name] = Line(name, (*points, point))
    return Panel(figure.name, X_LABELS[axis], f"{figure.name}, {figure.unit}", list(lines.values()))


def _labels(cells: Sequence[Cell]) -> list[str]:
    """What cells differ in."""
    axes = varying([cell.settings for cell in cells])
    ordered = [*(axis for axis in axes if axis not in SIZES), *(a for a in SIZES if a in axes)]
    return [", ".join(f"{axis} {cell.shown(axis)}" for axis in ordered or SIZES) for cell in cells]
