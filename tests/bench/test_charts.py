from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lite_runner.bench import charts
from lite_runner.bench.charts import COLORS, Drawing, Line, Panel, draw, figures_chart, ratios_chart
from lite_runner.bench.options import CellSettings
from lite_runner.bench.report import FIGURES, Cell, Former, Measured, Report, Spread, compared
from lite_runner.errors import EnvironmentFault
from lite_runner.evaluation.harness import TaskReport, TaskResult
from lite_runner.evaluation.metrics import MetricResult, difference
from lite_runner.profile import KernelTime, Profile

SVG = "{http://www.w3.org/2000/svg}"
SIDES = ("width", "height")


def texts(drawing: Drawing) -> list[str]:
    assert drawing.png.startswith(b"\x89PNG\r\n\x1a\n")
    root = ElementTree.fromstring(drawing.svg)
    assert root.tag == f"{SVG}svg"
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def panel(*lines: Line) -> Panel:
    return Panel("decode", "batch, rows", "decode, tokens/s", lines)


def line(name: str, xs: Sequence[float | str]) -> Line:
    return Line(name, [(x, Spread.of([1, 2, 4])) for x in xs])


@pytest.fixture
def grid(
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
) -> Report:
    cells = [
        Cell(settings=settings(batch=batch, quant=quant), measured=measured([9, 10, 12]))
        for quant in ("a16w8", "a16w4")
        for batch in (1, 8)
    ]
    return report(*cells, Cell(settings=settings(batch=16), error="no memory"))


def test_axes_have_titles_with_units_and_ticks_are_the_data(grid: Report) -> None:
    drawn = texts(figures_chart(grid, "tiny_llama"))
    assert drawn.count("batch, rows") == 6
    for key in ("prefill_tok_s", "decode_tok_s", "peak_mib", "first_token_ms", "token_ms_p99"):
        assert f"{FIGURES[key].name}, {FIGURES[key].unit}" in drawn
    assert drawn.count("8") >= 6 and "16" not in drawn
    assert drawn.count("quant a16w8") == drawn.count("quant a16w4") == 1  # in the legend


def test_the_same_figures_are_the_same_files(grid: Report) -> None:
    first, second = figures_chart(grid, "tiny_llama"), figures_chart(grid, "tiny_llama")
    assert first == second
    assert b"<dc:date>" not in first.svg and b"matplotlib" not in first.png.lower()


def test_a_setting_that_is_no_number_is_drawn_as_bars(
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
) -> None:
    cells = [
        Cell(settings=settings(quant=quant), measured=measured([70.0], quant=quant))
        for quant in ("none", "a16w8", "a16w4")
    ]
    drawn = texts(figures_chart(report(*cells, repeat=1), "tiny_llama"))
    at = [drawn.index(quant) for quant in ("none", "a16w8", "a16w4")]
    assert at == sorted(at)  # in the order of the grid
    assert drawn.count("quant") == 6 and drawn.count("70.0") == 6 * 3


@pytest.mark.parametrize("xs", [[1], [1, 2, 4, 8], [0, 1], ["a", "b"]])
def test_every_line_is_drawn_in_its_color(xs: list[float | str]) -> None:
    names = [f"line {number}" for number in range(len(COLORS) + 2)]
    drawing = draw([panel(*(line(name, xs) for name in names))], "title")
    drawn = texts(drawing)
    assert "title" in drawn and set(names) <= set(drawn)
    assert all(color.lower().encode() in drawing.svg for color in COLORS)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bars_stand_around_their_tick(count: int) -> None:
    """Beside one another, each in its place."""
    lines = [line(f"line {number}", ["a", "b"]) for number in range(count)]
    figure = charts.empty((4, 3))
    axes = figure.subplots()
    charts._bars(axes, panel(*lines), [one.name for one in lines], ["a", "b"])
    middles = sorted(bar.get_x() + bar.get_width() / 2 for bar in axes.patches)
    for tick, of_tick in enumerate((middles[:count], middles[count:])):
        assert sum(of_tick) / count == pytest.approx(tick)
        assert all(abs(one - tick) < 0.5 for one in of_tick)


@pytest.mark.parametrize(("panels", "rows", "columns"), [(1, 1, 1), (4, 2, 2), (5, 2, 3)])
def test_a_figure_has_room_for_its_panels(panels: int, rows: int, columns: int) -> None:
    root = ElementTree.fromstring(draw([panel(line("a", [1, 2]))] * panels, "title").svg)
    width, height = (float(root.attrib[name].removesuffix("pt")) / 72 for name in SIDES)
    assert width == pytest.approx(columns * charts.PANEL_SIZE[0])
    assert height == pytest.approx(rows * charts.PANEL_SIZE[1] + 0.5)  # of the legend


def test_a_line_that_stands_in_few_panels_keeps_its_color() -> None:
    only_there = draw([panel(line("a", [1, 2]), line("b", [1, 2])), panel(line("b", [1, 2]))])
    # Markers and lines of b, twice, are all of the second color.
    uses = only_there.svg.count(COLORS[1].lower().encode())
    assert uses > only_there.svg.count(COLORS[0].lower().encode()) > 0


def test_ratios_are_drawn_of_cells_that_have_a_counterpart(grid: Report, tmp_path: Path) -> None:
    assert ratios_chart(grid, "tiny_llama") is None
    former = Former(tmp_path / "former" / "result.json", "tiny", grid)
    comparison = compared(grid.cells[1:], former)
    drawing = ratios_chart(replace(grid, cells=grid.cells[1:], comparison=comparison), "tiny_llama")
    assert drawing is not None
    drawn = texts(drawing)
    assert "tiny_llama: ratios to tiny in former" in drawn
    assert "quant a16w4, batch 1" in drawn and "quant a16w8, batch 1" not in drawn
    assert drawn.count("ratio to the former run") == 2
    none = replace(comparison, ratios=(None,) * 4)
    assert ratios_chart(replace(grid, cells=grid.cells[1:], comparison=none), "x") is None


def test_a_missing_matplotlib_is_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    charts.check_available()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentFault) as caught:
        charts.check_available()
    assert caught.value.exit_code == 3
    install = f'{sys.executable} -m pip install "matplotlib>=3.8"; or bench.charts=false, '
    assert caught.value.hint.startswith(install)


def bars(lines: dict[str, list[str]]) -> Panel:
    """A panel with a bar of 1234 for each group of a line."""
    drawn = [Line(n, [(g, Spread.of([1234.0])) for g in groups]) for n, groups in lines.items()]
    return Panel("title", "", "unit", drawn)


def test_numbers_lie_beside_bars_and_are_of_all_or_none() -> None:
    few = draw([bars({name: ["x", "y"] for name in "abcd"})]).svg.decode()
    assert few.count(">1234<") == 8 and few.count("rotate(-90)") >= 8  # wider than the bars
    wide = draw([bars({"a": ["x", "y"]})]).svg.decode()
    assert wide.count(">1234<") == 2
    many = {name: ["x", "y", "z"] for name in "abc"} | {"d": ["x"]}
    assert ">1234<" not in draw([bars(many)]).svg.decode()


def test_a_log_axis() -> None:
    line = Line("a", [(1, Spread.of([10.0])), (2, Spread.of([10_000.0]))])
    svg = draw([Panel("title", "x", "ms", [line], log=True)]).svg.decode()
    assert all(f">{tick}<" in svg for tick in ("10", "100", "1,000", "10,000"))


def test_ticks_over_a_wide_range_are_as_far_apart() -> None:
    line = Line("a", [(x, Spread.of([1.0])) for x in (1, 2, 4)])
    svg = ElementTree.fromstring(draw([Panel("title", "x", "ms", [line])]).svg)
    ticks = [
        one.find(f".//{SVG}use") for one in svg.iter(f"{SVG}g") if one.get("id", "")[:5] == "xtick"
    ]
    first, second, third = (float(one.get("x", "")) for one in ticks if one is not None)
    assert second - first == pytest.approx(third - second)


def test_a_roofline() -> None:
    kernel = KernelTime(name="head", calls=1, seconds=0.5, bytes=10**9, macs=2 * 10**9)
    profile = Profile(
        **{"seconds": 1.0, "phases": {}, "steps": {}, "kernels": [kernel], "layers": []},
        **{"collectives": [], "requests": []},
        **{"bandwidth": 1e10, "peak": 5e10, "events_left_out": 0},
    )
    drawing = charts.roofline_chart(profile, "a run")
    assert drawing is not None and drawing.png.startswith(b"\x89PNG")
    texts = "".join(ElementTree.fromstring(drawing.svg).itertext())
    assert "10.0 GB/s, 50.0 GMAC/s measured" in texts and "head" not in texts.replace("a run", "")
    assert charts.roofline_chart(replace(profile, bandwidth=0.0), "") is None


def test_scores_of_tasks() -> None:
    """A panel for each scale, and the run that they are compared with."""
    figures = [
        MetricResult(metric="acc", value=0.5, stderr=0.1),
        MetricResult(metric="perplexity", value=20.0, stderr=None),
    ]
    task = TaskResult(
        task="a", shots=0, samples=9, metrics=figures, parts={}, scored_elsewhere=None
    )
    report = TaskReport(
        **{"results": [task], "differences": [difference("a", "acc", [1.0, 0.0], [1.0, 1.0])]},
        **{"seconds": 1.0, "tokens": 1, "cached_tokens": 0, "resumed": 0, "interrupted": False},
    )
    drawing = charts.scores_chart(report, "tiny")
    assert drawing is not None
    texts = "".join(ElementTree.fromstring(drawing.svg).itertext())
    assert all(one in texts for one in ("share", "perplexity", "acc of the other run", "tiny"))
    assert charts.scores_chart(replace(report, results=(), differences=()), "") is None
