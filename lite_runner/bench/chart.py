"""Charts by matplotlib: panels of lines or bars with error bars, the same bytes for the same data.

matplotlib is imported only to draw: a run without charts does without it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lite_runner.bench.spread import Spread, number
from lite_runner.errors import EnvironmentFault
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, less yellow, which is faint on white: told apart by colour-blind readers.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GRID, TEXT = "#DDDDDD", "#333333"
PANEL_SIZE = 4.2, 3.1  # inches
BAR_ROOM = 0.8  # of the distance between two groups of bars
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


@dataclass(frozen=True)
class Drawing:
    """The files of one chart."""

    png: bytes
    svg: bytes


def check_available() -> None:
    """Raise EnvironmentFault where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise EnvironmentFault(
            "bench.charts=true: charts need matplotlib, which is not installed",
            "pip install 'lite-runner[bench]' (or: pip install matplotlib); or bench.charts=false,"
            " which leaves the table",
        )


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
            _panel(figure.add_subplot(rows, columns, place), panel, names)
        return finished(figure, title, names)


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
        columns = max(1, min(len(names), 4))
        shown = [handles[name] for name in names if name in handles]
        figure.legend(
            shown,
            [name for name in names if name in handles],
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
    png, svg = io.BytesIO(), io.BytesIO()
    # Neither a date nor a version: the same figures are the same files.
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
    return Drawing(png.getvalue(), svg.getvalue())


def plain(axes: Axes) -> None:
    """Light lines behind the data, no frame but the axes."""
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _panel(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    plain(axes)
    values = list(dict.fromkeys(x for line in panel.lines for x, _ in line.points))
    numbers = sorted(x for x in values if not isinstance(x, str))
    if len(numbers) == len(values) and len(values) > 1:
        _lines(axes, panel, names, numbers)
    else:
        _bars(axes, panel, names, values)
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
    width = BAR_ROOM / max(1, len(panel.lines))
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
        if len(line.points) * len(panel.lines) <= 8:
            texts = [number(spread.median) for _, spread in line.points]
            axes.bar_label(bars, texts, padding=2, fontsize=8)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.margins(y=0.12)


def _errors(spreads: Sequence[Spread]) -> list[list[float]] | None:
    """What the bars reach below and above the medians; None where nothing was repeated."""
    if all(len(spread.values) < 2 for spread in spreads):
        return None
    below = [spread.median - spread.min for spread in spreads]
    above = [spread.max - spread.median for spread in spreads]
    return [below, above]
