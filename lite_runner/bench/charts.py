"""Charts of a benchmark, of benchmarks/, of a profile and of an evaluation: panels of lines or bars
with error bars.

The same data gives the same bytes. matplotlib is imported only to draw.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner.bench.options import SIZES, CellSettings, varying
from lite_runner.bench.report import FIGURES, Cell, Report, Spread, number
from lite_runner.errors import EnvironmentFault
from lite_runner.evaluation.metrics import scale_of
from lite_runner.records import dataclass
from lite_runner.system import environment

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lite_runner.evaluation.harness import TaskReport
    from lite_runner.profile import Profile

# Okabe and Ito's palette, less yellow, which is faint on white: told apart by colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GRID, TEXT = "#DDDDDD", "#333333"
PANEL_SIZE = 4.2, 3.1  # inches
LABELLED = 8  # bars per panel with numbers; with more bars none has them
BAR_ROOM = 0.8  # of the distance between two groups of bars
# Widths in points: of a letter in a bar's label, and the least of a panel's axes.
LETTER, POINTS = 5, 200
SETTINGS = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lite-runner",  # of the ids in an SVG, else random
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#888888",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
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
NUMBERS = ("batch", "prompt", "threads", "new", "adapters")  # axes that a chart can have
ROW_INCHES = 0.6  # of a cell in the chart of ratios


@dataclass(frozen=True)
class Line:
    """One series; it has the same name, and so colour and marker, in all panels."""

    name: str
    points: Sequence[tuple[float | str, Spread]]  # x (a text: a category) and the figure


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    curve: bool = False  # many points, without markers
    log: bool = False  # figures of several magnitudes, all above 0


@dataclass(frozen=True)
class Drawing:
    """The files of one chart."""

    png: bytes
    svg: bytes


def check_available() -> None:
    """Raise EnvironmentFault where matplotlib is missing."""
    if not available():
        raise EnvironmentFault(
            "bench.charts=true: charts need matplotlib, which is not installed",
            f"{environment.install_line(environment.required('bench'))}; or bench.charts=false,"
            " which leaves the table",
        )


def available() -> bool:
    """True if charts can be drawn: matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(panels: Sequence[Panel], title: str = "") -> Drawing:
    """A chart of panels, two or three in a row, with one legend below them. A line's order among
    all names decides on its colour."""
    import matplotlib as mpl

    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    with mpl.rc_context(SETTINGS):
        size = columns * PANEL_SIZE[0], rows * PANEL_SIZE[1] + 0.5
        figure = empty(size)
        for place, panel in enumerate(panels, 1):
            _draw_panel(figure.add_subplot(rows, columns, place), panel, names)
        return finished(figure, title, names)


def roofline_chart(profile: Profile, title: str) -> Drawing | None:
    """The rates of native layers under what this machine gives, by multiply-adds per byte; None
    where neither was measured."""
    import matplotlib as mpl

    found = [one for one in profile.kernels if one.bytes and one.macs and one.seconds]
    if not found or not profile.bandwidth:
        return None
    corner = profile.peak / profile.bandwidth
    each = [one.macs / one.bytes for one in found]
    ends = min([corner, *each]) / 4, max([corner, *each]) * 4
    with mpl.rc_context(SETTINGS):
        figure = empty((PANEL_SIZE[0] * 1.4, PANEL_SIZE[1] * 1.2))
        axes = figure.add_subplot()
        plain(axes)
        roof = [ends[0], corner, ends[1]]
        axes.plot(roof, [min(profile.peak, profile.bandwidth * x) / 1e9 for x in roof], color=TEXT)
        for index, (one, x) in enumerate(zip(found, each, strict=True)):
            axes.plot(
                [x],
                [one.macs_s / 1e9],
                label=one.name,
                color=COLORS[index % len(COLORS)],
                marker=MARKERS[index % len(MARKERS)],
                linestyle="none",
            )
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("multiply-adds per byte read")
        axes.set_ylabel("GMAC/s")
        axes.set_title(
            f"{profile.bandwidth / 1e9:.1f} GB/s, {profile.peak / 1e9:.1f} GMAC/s measured",
            fontsize=10,
            loc="left",
        )
        return finished(figure, title, [one.name for one in found])


def scores_chart(report: TaskReport, title: str) -> Drawing | None:
    """The figures of tasks with intervals of 95 %, and beside them those of the run that they are
    compared with; None where there are none. A panel for each scale."""
    panels: dict[str, dict[str, list[tuple[float | str, Spread]]]] = {}

    def add(task: str, metric: str, name: str, value: float, error: float) -> None:
        low, high = value - 1.96 * error, value + 1.96 * error
        spread = Spread(value, low, high, low, high, (low, value, high))
        panels.setdefault(scale_of(metric), {}).setdefault(name, []).append((task, spread))

    for task in report.results:
        for one in task.metrics:
            add(task.task, one.metric, one.metric, one.value, one.stderr or 0.0)
    for pair in report.differences:
        add(pair.task, pair.metric, f"{pair.metric} of the other run", pair.other, 0.0)
    drawn = [
        Panel(scale, "", scale, [Line(name, points) for name, points in lines.items()])
        for scale, lines in panels.items()
    ]
    return draw(drawn, title) if drawn else None


def empty(inches: tuple[float, float]) -> Figure:
    """A figure whose panels keep a distance. To be called with SETTINGS in place."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    return Figure(figsize=inches, layout=engine, facecolor="white")


def finished(figure: Figure, title: str, names: Sequence[str]) -> Drawing:
    """A figure with a title above and a legend of `names` below its panels, as files.

    To be called with SETTINGS in place.
    """
    if title:
        figure.suptitle(title, fontsize=10)
    if len(names) > 1:
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        columns = min(len(names), 4)
        shown = [handles[name] for name in names if name in handles]
        figure.legend(
            shown,
            [name for name in names if name in handles],
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
    png, svg = io.BytesIO(), io.BytesIO()
    # Neither date nor version: the same figures give the same files.
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Drawing(png.getvalue(), svg.getvalue())


def plain(axes: Axes) -> None:
    """Light grid lines behind the data, no frame except the axes."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    plain(axes)
    values = list(dict.fromkeys(x for line in panel.lines for x, _ in line.points))
    numbers = sorted(x for x in values if not isinstance(x, str))
    if panel.curve:
        for line in panel.lines:
            index = names.index(line.name)
            axes.plot(
                [float(x) for x, _ in line.points],
                [spread.median for _, spread in line.points],
                label=line.name,
                color=COLORS[index % len(COLORS)],
                linewidth=1.2,
            )
    elif len(numbers) == len(values) and len(values) > 1:
        _lines(axes, panel, names, numbers)
    else:
        _bars(axes, panel, names, values)
    if panel.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.yaxis.set_major_formatter("{x:,g}")


def _lines(axes: Axes, panel: Panel, names: Sequence[str], ticks: Sequence[float]) -> None:
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        axes.set_xscale("log", base=2)
    for line in panel.lines:
        index, points = names.index(line.name), sorted(line.points, key=lambda point: point[0])
        axes.errorbar(
            [float(x) for x, _ in points],
            [spread.median for _, spread in points],
            yerr=_errors([spread for _, spread in points]),
            label=line.name,
            color=COLORS[index % len(COLORS)],
            marker=MARKERS[index % len(MARKERS)],
            # With more lines than colours the second round is dashed.
            linestyle="--" if index // len(COLORS) % 2 else "-",
            markersize=5,
            linewidth=1.6,
            capsize=3,
        )
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _bars(axes: Axes, panel: Panel, names: Sequence[str], groups: Sequence[float | str]) -> None:
    width, room = BAR_ROOM / max(1, len(panel.lines)), 0.12
    for place, line in enumerate(panel.lines):
        index = names.index(line.name)
        offset = (place - (len(panel.lines) - 1) / 2) * width
        bars = axes.bar(
            [groups.index(x) + offset for x, _ in line.points],
            [spread.median for _, spread in line.points],
            width * 0.9,
            yerr=_errors([spread for _, spread in line.points]),
            label=line.name,
            color=COLORS[index % len(COLORS)],
            hatch="//" if index // len(COLORS) % 2 else None,
            error_kw={"capsize": 3, "ecolor": TEXT},
        )
        if line.points and sum(len(one.points) for one in panel.lines) <= LABELLED:
            texts = [number(spread.median) for _, spread in line.points]
            # Upright where it is wider than its bar, and would lie on the next one.
            wide = max(map(len, texts), default=0) * LETTER > width * 0.9 * POINTS / len(groups)
            axes.bar_label(bars, texts, padding=2, fontsize=8, rotation=90 if wide else 0)
            room = 0.3 if wide else room
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.margins(y=room)


def _errors(spreads: Sequence[Spread]) -> list[list[float]] | None:
    """Lengths of the error bars below and above the medians; None: nothing was repeated."""
    if all(len(spread.values) < 2 for spread in spreads):
        return None
    below = [spread.median - spread.min for spread in spreads]
    above = [spread.max - spread.median for spread in spreads]
    return [below, above]


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


def _along(cells: Sequence[CellSettings]) -> str:
    """The x axis: the numeric one with the most values, else a setting that varies."""
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
    """Labels of cells: the settings in which they differ."""
    axes = varying([cell.settings for cell in cells])
    ordered = [*(axis for axis in axes if axis not in SIZES), *(a for a in SIZES if a in axes)]
    return [", ".join(f"{axis} {cell.shown(axis)}" for axis in ordered or SIZES) for cell in cells]
