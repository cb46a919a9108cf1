from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row
from lite_runner.bench import workload as module
from lite_runner.bench.workload import Timed, random_adapters, timed
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve


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
