"""Line charts side by side as one SVG, standard library only: doublings along x, y from zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
WIDTH, HEIGHT = 300, 220  # of one plot, without its labels
LEFT, TOP, BOTTOM = 55, 30, 45  # room for them
COLUMNS = 2
LEGEND_LINE = 18


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[tuple[float, float]]  # x > 0 and y >= 0


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    lines: Sequence[Line]  # an engine has the same place, and so colour, in all panels


def draw(panels: Sequence[Panel]) -> str:
    """The SVG of panels, two a row, with one legend below."""
    rows = math.ceil(len(panels) / COLUMNS)
    cell = (LEFT + WIDTH + 20, TOP + HEIGHT + BOTTOM)
    names = [line.name for line in panels[0].lines]
    width, legend = COLUMNS * cell[0], rows * cell[1]
    height = legend + LEGEND_LINE * len(names) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        place = (index % COLUMNS * cell[0] + LEFT, index // COLUMNS * cell[1] + TOP)
        parts += [f'<g transform="translate({place[0]} {place[1]})">', *_panel(panel), "</g>"]
    for index, name in enumerate(names):
        y = legend + LEGEND_LINE * index
        parts.append(f'<rect x="{LEFT}" y="{y}" width="20" height="4" fill="{_color(index)}"/>')
        parts.append(f'<text x="{LEFT + 28}" y="{y + 7}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def step(largest: float) -> float:
    """A distance between marks, 1, 2 or 5 times a power of ten, of which 3 to 6 reach `largest`."""
    power = 10.0 ** math.floor(math.log10(largest))
    for factor in (0.2, 0.5, 1, 2):
        if largest <= 6 * factor * power:
            return factor * power
    raise AssertionError(largest)  # below 10 times its power of ten


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    title = f'<text y="-10" font-weight="bold">{escape(panel.title)}</text>'
    if not points:
        return [title]
    low, high = (math.log2(edge([x for x, _ in points])) for edge in (min, max))
    mark = step(max(y for _, y in points))
    top = mark * math.ceil(max(y for _, y in points) / mark)

    def place(x: float, y: float) -> tuple[float, float]:
        along = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return round(along * WIDTH, 1), round(HEIGHT * (1 - y / top), 1)

    parts = [title]
    for number in range(round(top / mark) + 1):
        y = place(points[0][0], number * mark)[1]
        parts.append(f'<path d="M0 {y}H{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="-8" y="{y + 4}" text-anchor="end">{number * mark:g}</text>')
    for x in sorted({x for x, _ in points}):
        at = place(x, 0)[0]
        parts.append(f'<text x="{at}" y="{HEIGHT + 18}" text-anchor="middle">{x:g}</text>')
    label = f'<text x="{WIDTH / 2}" y="{HEIGHT + 36}" text-anchor="middle">'
    parts.append(f"{label}{escape(panel.x_label)}</text>")
    for index, line in enumerate(panel.lines):
        spots = [place(x, y) for x, y in line.points]
        path = " ".join(f"{x},{y}" for x, y in spots)
        color = _color(index)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>' for x, y in spots]
    return parts
