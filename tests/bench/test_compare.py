from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.bench.compare import (
    Former,
    check_comparable,
    compared,
    counterparts,
    read_former,
)
from lite_runner.bench.grid import Settings
from lite_runner.bench.report import Cell, Measured, Report
from lite_runner.errors import ConfigError

Make = Callable[..., Settings]


def test_what_has_one_value_in_each_run_may_differ(settings: Make) -> None:
    now = [settings(quant="a16w8", batch=batch) for batch in (1, 4)]
    then = [settings(threads=2, batch=batch) for batch in (4, 8, 1)]
    assert counterparts(now, then) == [2, 0]


def test_what_varies_must_be_equal(settings: Make) -> None:
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
    settings: Make,
    measured: Callable[..., Measured],
    report: Callable[..., Report],
    tmp_path: Path,
) -> None:
    told = report(Cell(settings=settings(), measured=measured([1, 2])))
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"model": "tiny", "bench": told.to_json()}))
    assert read_former(str(tmp_path)) == read_former(str(file)) == Former(file, "tiny", told)
    check_comparable([settings(threads=3)], Former(file, "tiny", told))
    several = replace(told, cells=(*told.cells, Cell(settings=settings(batch=2))))
    with pytest.raises(ConfigError, match=r"has none of these cells, only batch 1, new 32"):
        check_comparable([settings(batch=3)], Former(file, "tiny", several))


@pytest.mark.parametrize("text", ["", "[]", '{"model": "tiny"}', '{"model": "x", "bench": {}}'])
def test_what_is_no_benchmark_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bench\.compare: .*result\.json: holds no benchmark"):
        read_former(str(tmp_path))
    with pytest.raises(ConfigError, match=r"bench\.compare: .*No such file"):
        read_former(str(tmp_path / "nothing"))
