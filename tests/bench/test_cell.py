"""A cell's real process, with tiny_llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row
from lite_runner.bench import cell as module
from lite_runner.bench.bench import run_cells
from lite_runner.bench.cell import Timed, random_adapters, timed
from lite_runner.bench.options import CellJob, CellOptions, CellSettings
from lite_runner.bench.report import FIGURES, Cell
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve


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
    raw = config.of_cell(settings).to_dict()
    return CellJob(config=raw, plugins=(), settings=settings, warmup=1, repeat=repeat)


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


def test_conflicting_settings_are_the_error_of_their_cell(
    config: CellOptions, settings: Callable[..., CellSettings]
) -> None:
    lite = replace(config, engine="lite", backend="mslite")
    (cell,) = run_cells([job(lite, settings(quant="a16w8"), repeat=1)], context=256)
    assert cell.measured is None
    assert "quant=a16w8 is not available with backend=mslite" in (cell.error or "")


def test_every_linear_layer_has_a_pair_of_its_own_values() -> None:
    model = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))[0].model_config()
    assert model is not None
    first, second = random_adapters(model, 2, rank=4)
    assert (first.name, second.name) == ("a0", "a1")
    assert len(first.pairs) == 7 * model.num_layers
    seen = set()
    for adapter in (first, second):
        for pair in adapter.pairs.values():
            assert pair.rank == 4 and pair.a.shape[0] == pair.b.shape[1] == 4
            a, b = pair.values()
            assert (a.shape, b.shape) == (pair.a.shape, pair.b.shape)
            assert np.isfinite(a).all() and b.any()
            assert a.std() * a.shape[1] ** 0.5 == pytest.approx(1, rel=0.2)  # as LoRA begins
            assert np.array_equal(pair.a.read(), a)  # the same whenever they are read
            seen.add(a.tobytes())
    assert len(seen) == 2 * len(first.pairs)


class Clock:
    """A backend that computes nothing, and the time that its steps take."""

    adapters = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info = BackendInfo("none", 8, slots=2, max_length=16, budget=4, chunk=1)
        self.now = self.compile_s = 0.0
        self.rows: list[list[int]] = []  # tokens of each row, step by step
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        if not self.rows:
            self.compile_s += 100
            self.now += 100
        self.rows.append([len(row.tokens) for row in rows])
        self.now += len(self.rows)
        return np.zeros((len(rows), 8), np.float32)


def test_the_first_step_reads_all_and_compiling_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    found = timed(clock, [[1, 2, 3], [4, 5, 6]], new_tokens=4)  # type: ignore[arg-type]
    assert clock.rows == [[3, 3], [1, 1], [1, 1], [1, 1]]
    assert found == Timed(rows=2, prompt_tokens=6, steps=[1, 2, 3, 4])


def test_figures_are_of_steps() -> None:
    assert Timed(rows=2, prompt_tokens=6, steps=[0.5, 0.1, 0.2, 0.3]).figures == pytest.approx(
        {
            "prefill_tok_s": 12,
            "decode_tok_s": 10,
            "first_token_ms": 500,
            "token_ms_p50": 200,
            "token_ms_p95": 290,
            "token_ms_p99": 298,
        }
    )
