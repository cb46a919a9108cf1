from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lite_runner.config.groups import options_of
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.sizing.need import (
    Memory,
    MemoryHint,
    check_memory,
    memory_need,
    parameter_count,
    readable,
)
from lite_runner.system import memory
from tests.models import model_named
from tests.paths import FIXTURES

Resolve = Callable[..., RunConfig]


PUBLISHED: dict[str, Any] = json.loads(
    (FIXTURES / "published_parameters.json").read_text(encoding="utf-8")
)["models"]


def test_every_model_with_weights_has_a_published_count() -> None:
    named = {name for name in options_of("model") if name != "auto" and "tiny" not in name}
    assert named == PUBLISHED.keys()


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one["stated"]])
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    stated = PUBLISHED[name]["stated"]
    count = parameter_count(model_named(name)) + sum(PUBLISHED[name].get("more", {}).values())
    if isinstance(stated, str):  # rounded to the digits that are there
        digits = len(stated.partition(".")[2].rstrip("BM"))
        count = f"{count / (1e9 if stated.endswith('B') else 1e6):.{digits}f}{stated[-1]}"
    assert count == stated


def test_memory_of_weights_and_cache() -> None:
    model = model_named("smollm2_135m")
    need = memory_need(model, "float32", slots=8, length=256)
    assert need.weights == 134_515_008 * 4
    assert need.cache == 8 * 256 * 30 * 2 * 3 * 64 * 4
    assert need.total == need.weights + need.cache
    assert memory_need(model, "float16", 8, 256).total * 2 == need.total
    assert memory_need(model, "float32", 8, 256, use_past=False).cache == 0


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 100)
    check_memory(Memory(60, 40))
    smaller = MemoryHint("quant=a16w4", Memory(30, 41))
    with pytest.raises(EnvironmentFault) as caught:
        check_memory(Memory(60, 41), lambda: [smaller])
    assert "needs 101 B (weights 60 B, cache 41 B), but 100 B is free" in caught.value.message
    assert caught.value.hint.startswith("quant=a16w4 would need 71 B; or a smaller model")
    assert caught.value.exit_code == 3


def test_the_peak_is_in_loading_or_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Memory(100, 20, 5, process=50, loading=10, work=7)
    assert (need.total, need.held) == (50 + 100 + 32, 125)
    assert Memory(100, 20, process=50, loading=90, work=7).total == 240
    assert "more while loading 63 B" in Memory(100, 20, process=50, loading=90, work=7).parts()
    # What the process has already is not needed once more.
    monkeypatch.setattr(memory, "resident", lambda: 30)
    monkeypatch.setattr(memory, "free_memory", lambda: need.total - 30)
    check_memory(need)
    monkeypatch.setattr(memory, "free_memory", lambda: need.total - 31)
    with pytest.raises(EnvironmentFault, match="but 181 B is free"):
        check_memory(need)


def test_sizes_for_people() -> None:
    assert [readable(n) for n in (999, 538_100_000, 4 * 10**12)] == ["999 B", "538.1 MB", "4.0 TB"]
