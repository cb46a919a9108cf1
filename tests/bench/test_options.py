from __future__ import annotations

from typing import Any

import pytest

from lite_runner.bench.options import BenchOptions
from lite_runner.config.fields import Fault, hints_of, read
from lite_runner.config.grammar import value_of

PLAIN: dict[str, Any] = {
    **{"batch": [1, 8], "prompt": 128, "new": [16], "threads": None, "quant": [None]},
    **{"adapters": 0, "backend": None, "warmup": 1, "repeat": 3, "charts": True, "compare": ""},
}


def options(**changes: Any) -> tuple[BenchOptions | None, list[str]]:
    faults: list[Fault] = []
    found = read({**PLAIN, **changes}, BenchOptions, "bench", faults)
    if found is not None:
        faults += found.faults()
    return found, [fault.text for fault in faults]


def test_a_value_is_a_list_of_one() -> None:
    found, faults = options()
    assert found is not None and not faults
    cells = list(found.grid.cells())
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
def test_what_is_typed_is_read(typed: str, key: str, value: Any) -> None:
    assert value_of(typed, hints_of(BenchOptions)[key]) == value
    assert options(**{key: value})[1] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": []}, "bench.batch: got [], expected at least one value"),
        ({"new": [16, 1]}, "bench.new"),
        ({"prompt": 0}, "bench.prompt"),
        ({"quant": ["a16w9"]}, "bench.quant"),
        ({"backend": "auto"}, "bench.backend"),
        ({"repeat": 0}, "bench.repeat"),
    ],
)
def test_faults_name_their_key(changes: dict[str, Any], said: str) -> None:
    faults = options(**changes)[1]
    assert len(faults) == 1 and said in faults[0]
