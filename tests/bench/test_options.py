from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lite_runner.bench.options import (
    BenchOptions,
    CellOptions,
    CellSettings,
    shared,
    skip_reason,
    varying,
)
from lite_runner.config import Invalid, hints_of, read
from lite_runner.config.argv import value_of

PLAIN: dict[str, Any] = {
    **{"batch": [1, 8], "prompt": 128, "new": [16], "threads": None, "quant": [None]},
    **{"adapters": 0, "backend": None, "warmup": 1, "repeat": 3, "charts": True, "compare": ""},
}


def options(**changes: Any) -> tuple[BenchOptions | None, list[str]]:
    faults: list[Invalid] = []
    found = read({**PLAIN, **changes}, BenchOptions, "bench", faults)
    if found is not None:
        faults += found.errors()
    return found, [fault.text for fault in faults]


def test_a_value_is_a_list_of_one() -> None:
    found, faults = options()
    assert found is not None and not faults
    cells = list(found.cells())
    assert [(cell.batch, cell.prompt, cell.new, cell.quant) for cell in cells] == [
        (1, 128, 16, None),
        (8, 128, 16, None),
    ]


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("[null,a16w8]", "quant", [None, "a16w8"]),
        ("a16w8", "quant", "a16w8"),
        ("[null,2]", "threads", [None, 2]),
        ("null", "threads", None),
        ("[ms,mslite]", "backend", ["ms", "mslite"]),
        ("[0,4]", "adapters", [0, 4]),
        ("64", "prompt", 64),
    ],
)
def test_typed_values_are_read(typed: str, key: str, value: Any) -> None:
    assert value_of(typed, hints_of(BenchOptions)[key]) == value
    assert options(**{key: value})[1] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": []}, "bench.batch: got [], expected at least one value"),
        ({"new": [16, 1]}, "bench.new"),
        ({"prompt": 0}, "bench.prompt"),
        ({"quant": ["a16w9"]}, "bench.quant"),
        ({"backend": "auto"}, "bench.backend"),
        ({"repeat": 0}, "bench.repeat"),
    ],
)
def test_faults_name_their_key(changes: dict[str, Any], message: str) -> None:
    faults = options(**changes)[1]
    assert len(faults) == 1 and message in faults[0]


def test_a_cell_has_the_run_s_config_less_what_it_sets_itself(
    config: CellOptions, settings: Callable[..., CellSettings]
) -> None:
    run = replace(config, quant="a16w4", quant_group=64, kv_cache="int8")
    left = run.of_cell(settings())
    assert type(left) is CellOptions
    assert (left.quant, left.quant_group, left.kv_cache) == ("a16w4", 64, "int8")
    assert (left.backend, left.context.threads) == ("auto", None)
    given = run.of_cell(settings(backend="mslite", quant="none", threads=2))
    assert (given.backend, given.quant, given.quant_group) == ("mslite", "none", None)
    assert given.context.threads == 2
    assert CellOptions.from_dict(given.to_dict()) == given


def test_settings_of_exported_models_are_for_the_cells_that_run_one(
    config: CellOptions, settings: Callable[..., CellSettings]
) -> None:
    run = replace(config, engine="lite")
    assert not list(run.of_cell(settings()).cell_errors())
    lite = run.of_cell(settings(backend="mslite", quant="a16w8"))
    assert [one.text for one in lite.cell_errors()] == [
        "quant=a16w8 is not available with backend=mslite: graphs compute with floats;"
        " backend=native computes without an export"
    ]


def test_every_combination_once_and_the_batch_varies_fastest() -> None:
    found, faults = options(quant=[None, "a16w8"], prompt=[16, 32], new=[8], batch=[1, 4, 1])
    assert found is not None and not faults
    cells = list(found.cells())
    assert len(cells) == len(set(cells)) == 2 * 2 * 2
    assert [(cell.quant, cell.prompt, cell.batch) for cell in cells[:5]] == [
        (None, 16, 1),
        (None, 16, 4),
        (None, 32, 1),
        (None, 32, 4),
        ("a16w8", 16, 1),
    ]


def test_settings_left_to_the_run_are_not_shown(settings: Callable[..., CellSettings]) -> None:
    assert str(settings(quant="a16w8")) == "batch 1, new 32, prompt 128, quant a16w8"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"prompt": 224}, ""),
        ({"prompt": 225}, "257 tokens do not fit the model's context of 256"),
        ({"adapters": 1}, ""),
        ({"adapters": 2}, "a batch of 1 cannot mix 2 adapters"),
    ],
)
def test_meaningless_cells_are_left_out(
    settings: Callable[..., CellSettings], changes: dict[str, int], why: str
) -> None:
    assert skip_reason(settings(**changes), context=256) == why


def test_shared_and_varying_settings_of_cells(settings: Callable[..., CellSettings]) -> None:
    cells = [settings(batch=1, quant="a16w8"), settings(batch=8, quant="a16w8")]
    assert varying(cells) == ["batch"]
    assert shared(cells) == {"quant": "a16w8", "adapters": 0, "prompt": 128, "new": 32}
    assert shared([]) == {}
