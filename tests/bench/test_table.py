from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lite_runner.bench.compare import Former, compared
from lite_runner.bench.grid import Settings
from lite_runner.bench.report import FIGURES, Cell, Measured, Report
from lite_runner.bench.spread import Spread
from lite_runner.bench.table import document, markdown, table, with_spread


def cells_of(text: str) -> list[list[str]]:
    """The rows of a Markdown table, less its rule."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [found[0], *found[2:]]


def test_columns_are_aligned() -> None:
    assert markdown(["a", "long"], [["bb", "1"], ["c", "234"]]).splitlines() == [
        "| a   | long |",
        "|-----|-----:|",
        "| bb  |    1 |",
        "| c   |  234 |",
    ]


def test_a_spread_is_half_of_the_range() -> None:
    assert with_spread(Spread.of([98, 100, 102])) == "100.0 ±2%"
    assert with_spread(Spread.of([4.724])) == "4.72"


def test_a_row_a_cell_with_what_varies(
    settings: Callable[..., Settings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
) -> None:
    told = report(
        Cell(settings=settings(), measured=measured([9, 10, 11])),
        Cell(settings=settings(quant="a8w8"), error="a\nfault | of two lines"),
        Cell(settings=settings(quant="a8w8", batch=4), left_out="too long"),
        Cell(settings=settings(batch=4), left_out="too long"),
    )
    head, *rows = cells_of(table(told))
    assert head[:5] == ["quant", "batch", "prompt", "new", "prefill, tokens/s"]
    assert {len(row) for row in (head, *rows)} == {4 + len(FIGURES)}
    assert rows[0][:5] == ["none", "1", "128", "32", "10.0 ±10%"]
    assert [row[4] for row in rows[1:]] == ["failed (1)", "left out (2)", "left out (2)"]
    text = document(told, "tiny_llama")
    assert text.startswith("# tiny_llama\n\nA processor, 2 cores, 24 GiB. quant none; engine")
    assert text.endswith("\n1. a fault | of two lines\n2. too long\n")


def test_ratios_stand_in_brackets(
    settings: Callable[..., Settings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
) -> None:
    then = report(*(Cell(settings=settings(batch=b), measured=measured([9, 11])) for b in (1, 2)))
    now = (
        Cell(settings=settings(batch=1), measured=measured([10, 12], engine="other")),
        Cell(settings=settings(batch=2), measured=measured([20])),
        Cell(settings=settings(batch=3), measured=measured([20]), busy_cores=0.52),
    )
    former = Former(Path("/runs/first/result.json"), "tiny", then)
    told = report(*now, comparison=compared(now, former))
    head, *rows = cells_of(table(told))
    assert head[:2] == ["engine", "batch"] and rows[0][0] == "other"
    assert table(told).splitlines()[1].startswith("|---------|------:|")
    assert [row[4] for row in rows] == ["11.0 ±9% (~1.10)", "20.0 (2.00)", "20.0"]
    text = document(told, "tiny_llama")
    assert "the ratio to tiny in /runs/first, with ~ where the ranges overlap" in text
    assert "other programs kept up to 0.5 cores busy during 1 cell." in text
    assert "Doubtful" not in document(replace(told, cells=now[:2], comparison=None), "tiny_llama")
