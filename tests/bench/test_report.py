from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lite_runner.bench.compare import Former, compared
from lite_runner.bench.grid import Settings
from lite_runner.bench.report import Cell, Measured, Report


def test_json_both_ways(
    settings: Callable[..., Settings],
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
        assert Report.from_json(json.loads(json.dumps(one.to_json(), allow_nan=False))) == one
    assert found.failed == 1


def test_an_axis_is_shown_as_it_was_measured(
    settings: Callable[..., Settings], measured: Callable[..., Measured]
) -> None:
    cell = Cell(settings=settings(), measured=measured([1], quant="a16w8"))
    assert [cell.shown(axis) for axis in ("quant", "threads", "batch")] == ["a16w8", "null", "1"]
    assert Cell(settings=settings(), error="x").shown("quant") == "null"
