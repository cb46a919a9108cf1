from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lite_runner.bench.options import CellOptions, CellSettings
from lite_runner.bench.report import FIGURES, Cell, Machine, Measured, Report, Spread
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve


@pytest.fixture
def settings() -> Callable[..., CellSettings]:
    """`settings(batch=8)`: of one cell, all else the same."""

    def make(**changes: Any) -> CellSettings:
        plain = {"backend": None, "quant": None, "threads": None, "adapters": 0}
        sizes = {"prompt": 128, "new": 32, "batch": 1}
        return CellSettings(**{**plain, **sizes, **changes})

    return make


@pytest.fixture(scope="session")
def config() -> CellOptions:
    """The config of cells with tiny_llama."""
    line = parse(["run_mode=bench", "model=tiny_llama"], heads())
    found, _ = resolve(line)
    assert isinstance(found, CellOptions)
    return found


@pytest.fixture
def measured() -> Callable[..., Measured]:
    """`measured([1, 2, 3], quant="a16w8")`: every figure has these values."""

    def make(values: Sequence[float], **changes: Any) -> Measured:
        plain: dict[str, Any] = {"engine": "kernels", "quant": "none", "load_s": 1.0}
        rest = {"compile_s": 0.5, "load_peak_mib": 500.0}
        figures = {key: Spread.of(values) for key in FIGURES}
        return Measured(**{**plain, **rest, "figures": figures, **changes})

    return make


@pytest.fixture
def report() -> Callable[..., Report]:
    """`report(cell, cell)`: of a machine that is always the same."""

    def make(*cells: Cell, **changes: Any) -> Report:
        machine = Machine(processor="A processor", cores=2, memory_mib=24 * 1024)
        return Report(**{"machine": machine, "warmup": 1, "repeat": 3, "cells": cells, **changes})

    return make
