from __future__ import annotations

from collections.abc import Callable

import pytest

from lite_runner.bench.grid import Grid, Settings, shared, varying, why_left_out


def test_every_combination_once_and_the_batch_varies_fastest() -> None:
    grid = Grid(quant=[None, "a16w8"], prompt=[16, 32], new=[8], batch=[1, 4, 1])
    cells = list(grid.cells())
    assert len(cells) == len(set(cells)) == 2 * 2 * 2
    assert [(cell.quant, cell.prompt, cell.batch) for cell in cells[:5]] == [
        (None, 16, 1),
        (None, 16, 4),
        (None, 32, 1),
        (None, 32, 4),
        ("a16w8", 16, 1),
    ]


def test_what_is_left_to_the_run_is_not_told(settings: Callable[..., Settings]) -> None:
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
def test_what_makes_no_sense_is_left_out(
    settings: Callable[..., Settings], changes: dict[str, int], why: str
) -> None:
    assert why_left_out(settings(**changes), context=256) == why


def test_what_cells_share_and_where_they_differ(settings: Callable[..., Settings]) -> None:
    cells = [settings(batch=1, quant="a16w8"), settings(batch=8, quant="a16w8")]
    assert varying(cells) == ["batch"]
    assert shared(cells) == {"quant": "a16w8", "adapters": 0, "prompt": 128, "new": 32}
    assert shared([]) == {}
