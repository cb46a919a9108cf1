"""A cell's real process, with tiny_llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lite_runner.bench.bench import run_cells
from lite_runner.bench.options import CellJob, CellOptions, CellSettings
from lite_runner.bench.report import FIGURES, Cell


@pytest.fixture(scope="module")
def cells(config: CellOptions) -> list[Cell]:
    common = {"backend": None, "threads": 1, "prompt": 24, "new": 6}
    grid = [
        CellSettings(**common, quant=None, adapters=0, batch=1),
        CellSettings(**common, quant="a16w8", adapters=2, batch=3),
    ]
    config = replace(config, profile=True)
    return list(run_cells([job(config, one, repeat=3) for one in grid], context=256))


def job(config: CellOptions, settings: CellSettings, repeat: int) -> CellJob:
    told = config.of_cell(settings).to_dict()
    return CellJob(config=told, plugins=(), settings=settings, warmup=1, repeat=repeat)


def test_every_figure_has_its_repetitions(cells: list[Cell]) -> None:
    for cell, quant in zip(cells, ("none", "a16w8"), strict=True):
        assert cell.error is None and cell.measured is not None
        assert cell.measured.quant == quant
        assert cell.measured.load_s > 0 and cell.measured.load_peak_mib > 30
        for key in FIGURES:
            spread = cell.measured.figures[key]
            assert len(spread.values) == 3 and 0 < spread.min <= spread.median <= spread.max


def test_each_cell_has_a_profile(cells: list[Cell]) -> None:
    for cell in cells:
        assert cell.profile is not None and cell.profile["steps"]["new_tokens"] > 0
        assert {one["name"] for one in cell.profile["kernels"]} >= {"attention", "feed_forward"}


def test_figures_of_one_repetition_fit_each_other(cells: list[Cell]) -> None:
    assert cells[1].measured is not None
    figures = {key: spread.values[0] for key, spread in cells[1].measured.figures.items()}
    prefill_s = 3 * 24 / figures["prefill_tok_s"]
    assert 1e3 * prefill_s == pytest.approx(figures["first_token_ms"])
    assert figures["token_ms_p50"] <= figures["token_ms_p95"] <= figures["token_ms_p99"]
    # 3 rows get a token in a step.
    assert 1e3 * 3 / figures["decode_tok_s"] <= figures["token_ms_p99"] * 1.0001


def test_what_does_not_go_together_is_the_error_of_its_cell(
    config: CellOptions, settings: Callable[..., CellSettings]
) -> None:
    lite = replace(config, engine="lite", backend="mslite")
    (cell,) = run_cells([job(lite, settings(quant="a16w8"), repeat=1)], context=256)
    assert cell.measured is None
    assert "quant=a16w8 is not available with backend=mslite" in (cell.error or "")
