from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.bench.options import CellSettings, from_plain
from lite_runner.bench.report import (
    FIGURES,
    Cell,
    Former,
    Measured,
    Report,
    Spread,
    check_comparable,
    compared,
    counterparts,
    document,
    markdown,
    number,
    percentile,
    read_former,
    table,
    with_spread,
)
from lite_runner.errors import ConfigError


def test_json_both_ways(
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
    tmp_path: Path,
) -> None:
    cells = (
        Cell(settings=settings(), measured=measured([1.0, 2.0]), busy_cores=0.5),
        Cell(settings=settings(batch=2), error="no memory"),
        Cell(settings=settings(batch=3), left_out="too long"),
    )
    found = report(*cells)
    with_ratios = replace(found, comparison=compared(cells, Former(tmp_path, "tiny", found)))
    assert with_ratios.comparison is not None and with_ratios.comparison.ratios[0]
    for one in (found, with_ratios):
        assert from_plain(Report, json.loads(json.dumps(one.to_json(), allow_nan=False))) == one
    assert found.failed == 1


def test_an_axis_shows_the_measured_value(
    settings: Callable[..., CellSettings], measured: Callable[..., Measured]
) -> None:
    cell = Cell(settings=settings(), measured=measured([1], quant="a16w8"))
    assert [cell.shown(axis) for axis in ("quant", "threads", "batch")] == ["a16w8", "null", "1"]
    assert Cell(settings=settings(), error="x").shown("quant") == "null"


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


@given(VALUES)
def test_spread_is_numpys(values: list[float]) -> None:
    found = Spread.of(values)
    assert found.values == tuple(values)
    assert (found.min, found.max) == (min(values), max(values))
    assert found.median == pytest.approx(np.median(values))
    assert [found.q1, found.q3] == pytest.approx(np.percentile(values, [25, 75]))
    assert found.half_range == pytest.approx(np.ptp(values) / 2)


def test_ranges_with_a_common_value_overlap() -> None:
    low, high, between = Spread.of([1, 2]), Spread.of([3, 4]), Spread.of([2, 3])
    assert not low.overlaps(high) and not high.overlaps(low)
    assert between.overlaps(low) and high.overlaps(between)


@pytest.mark.parametrize(
    ("value", "text"), [(2957.4, "2957"), (71.66, "71.7"), (4.724, "4.72"), (0.0314, "0.03")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


Make = Callable[..., CellSettings]


def test_settings_with_one_value_in_each_run_may_differ(settings: Make) -> None:
    now = [settings(quant="a16w8", batch=batch) for batch in (1, 4)]
    then = [settings(threads=2, batch=batch) for batch in (4, 8, 1)]
    assert counterparts(now, then) == [2, 0]


def test_varying_settings_must_be_equal(settings: Make) -> None:
    now = [settings(quant=quant) for quant in ("a16w8", "a8w8")]
    assert counterparts(now, [settings(quant=None), settings(quant="a8w8")]) == [None, 1]


def test_ratios_are_of_medians_and_say_whether_ranges_overlap(
    settings: Make, measured: Callable[..., Measured], report: Callable[..., Report]
) -> None:
    then = report(
        Cell(settings=settings(batch=1), measured=measured([10, 20, 30])),
        Cell(settings=settings(batch=2), measured=measured([10, 11, 12])),
        Cell(settings=settings(batch=3), error="no memory"),
    )
    now = [
        Cell(settings=settings(batch=1), measured=measured([25, 30, 35])),
        Cell(settings=settings(batch=2), measured=measured([20, 22, 24])),
        Cell(settings=settings(batch=3), measured=measured([1])),
        Cell(settings=settings(batch=4), measured=measured([1])),
    ]
    found = compared(now, Former(Path("result.json"), "tiny", then)).ratios
    assert found[2:] == (None, None)
    first, second = ((one or {})["decode_tok_s"] for one in found[:2])
    assert (first.ratio, first.overlap, first.low, first.high) == (1.5, True, 25 / 30, 3.5)
    assert (second.ratio, second.overlap) == (2, False)


def test_a_run_is_its_folder_or_its_result(
    settings: Make, measured: Callable[..., Measured], report: Callable[..., Report], tmp_path: Path
) -> None:
    full = report(Cell(settings=settings(), measured=measured([1, 2])))
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"model": "tiny", "bench": full.to_json()}))
    assert read_former(str(tmp_path)) == read_former(str(file)) == Former(file, "tiny", full)
    check_comparable([settings(threads=3)], Former(file, "tiny", full))
    several = replace(full, cells=(*full.cells, Cell(settings=settings(batch=2))))
    with pytest.raises(ConfigError, match=r"has none of these cells, only batch 1, new 32"):
        check_comparable([settings(batch=3)], Former(file, "tiny", several))


@pytest.mark.parametrize("text", ["", "[]", '{"model": "tiny"}', '{"model": "x", "bench": {}}'])
def test_other_files_than_benchmarks_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bench\.compare: .*result\.json: holds no benchmark"):
        read_former(str(tmp_path))
    with pytest.raises(ConfigError, match=r"bench\.compare: .*No such file"):
        read_former(str(tmp_path / "nothing"))


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
    settings: Callable[..., CellSettings],
    measured: Callable[..., Measured],
    report: Callable[..., Report],
) -> None:
    full = report(
        Cell(settings=settings(), measured=measured([9, 10, 11])),
        Cell(settings=settings(quant="a8w8"), error="a\nfault | of two lines"),
        Cell(settings=settings(quant="a8w8", batch=4), left_out="too long"),
        Cell(settings=settings(batch=4), left_out="too long"),
    )
    head, *rows = cells_of(table(full))
    assert head[:5] == ["quant", "batch", "prompt", "new", "prefill, tokens/s"]
    assert {len(row) for row in (head, *rows)} == {4 + len(FIGURES)}
    assert rows[0][:5] == ["none", "1", "128", "32", "10.0 ±10%"]
    assert [row[4] for row in rows[1:]] == ["failed (1)", "left out (2)", "left out (2)"]
    text = document(full, "tiny_llama")
    assert text.startswith("# tiny_llama\n\nA processor, 2 cores, 24 GiB. quant none; engine")
    assert text.endswith("\n1. a fault | of two lines\n2. too long\n")


def test_ratios_stand_in_brackets(
    settings: Callable[..., CellSettings],
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
    full = report(*now, comparison=compared(now, former))
    head, *rows = cells_of(table(full))
    assert head[:2] == ["engine", "batch"] and rows[0][0] == "other"
    assert table(full).splitlines()[1].startswith("|---------|------:|")
    assert [row[4] for row in rows] == ["11.0 ±9% (~1.10)", "20.0 (2.00)", "20.0"]
    text = document(full, "tiny_llama")
    assert "the ratio to tiny in /runs/first, with ~ where the ranges overlap" in text
    assert "other programs kept up to 0.5 cores busy during 1 cell." in text
    assert "3 repetitions after 1 that are not counted." in text
    assert "1 repetition after 1 that are not counted." in document(replace(full, repeat=1), "tiny")
    assert "Doubtful" not in document(replace(full, cells=now[:2], comparison=None), "tiny_llama")
