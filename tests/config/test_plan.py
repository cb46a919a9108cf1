from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config import plan as planning
from lite_runner.config.model import ModelConfig
from lite_runner.config.plan import (
    Memory,
    check_memory,
    free_memory,
    memory_need,
    parameter_count,
    plan,
    readable,
)
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault

Resolve = Callable[..., RunConfig]


def model_of(resolve: Resolve, name: str) -> ModelConfig:
    model = resolve(f"model={name}", "predict_data=x").model_config()
    assert model is not None
    return model


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
def test_parameter_counts_are_the_published_ones(
    resolve: Resolve, name: str, published: int
) -> None:
    assert parameter_count(model_of(resolve, name)) == published


def test_memory_of_weights_and_cache(resolve: Resolve) -> None:
    model = model_of(resolve, "smollm2_135m")
    need = memory_need(model, "float32", slots=8, length=256)
    assert need.weights == 134_515_008 * 4
    assert need.cache == 8 * 256 * 30 * 2 * 3 * 64 * 4
    assert need.total == need.weights + need.cache
    assert memory_need(model, "float16", 8, 256).total * 2 == need.total
    assert memory_need(model, "float32", 8, 256, use_past=False).cache == 0
    halves = memory_need(model, "float32", 8, 256, weights="float16")
    assert (halves.weights * 2, halves.cache) == (need.weights, need.cache)


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ([], "269.0 MB as float16"),
        (["context.kernels=false"], "538.1 MB as float32"),
        (["model.model_config.use_past=false"], "538.1 MB as float32"),
        (["use_parallel=true", "parallel_config.model_parallel=3"], "538.1 MB as float32"),
        (["use_parallel=true", "parallel_config.data_parallel=2"], "269.0 MB as float16"),
    ],
)
def test_weights_of_16_bits_take_half(resolve: Resolve, settings: list[str], held: str) -> None:
    """Where this project's operators serve; keys and values are float32 by kv_cache=."""
    half = "model.model_config.compute_dtype=float16"
    config = resolve("model=smollm2_135m", "predict_data=[x,y]", half, *settings)
    model = model_of(resolve, "smollm2_135m")
    text = "\n".join(plan(config, model, device="CPU", slots=1, length=256))
    assert held in text
    assert ("11.8 MB for 1 x 256 tokens" in text) == config.use_past


def test_a_model_that_does_not_fit_is_refused() -> None:
    check_memory(Memory(60, 40), 100)
    with pytest.raises(EnvironmentFault, match="60 B and the cache 41 B, but 100 B is free"):
        check_memory(Memory(60, 41), 100)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_CGROUP", tmp_path)
    machine = free_memory()
    assert machine > 0
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 200\n")
    assert free_memory() == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > 1000


def test_the_plan_shows_what_the_run_takes(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "free_memory", lambda: 10**9)
    config = resolve("dry_run=true")
    model = model_of(resolve, "smollm2_135m")
    text = "\n".join(plan(config, model, device="CPU", slots=1, length=256))
    for part in (
        *("smollm2_135m", "30 layers", "9 heads (3 key/value)", "134,515,008", "pypi://"),
        *(
            "538.1 MB as float32",
            "11.8 MB for 1 x 256 tokens",
            "needs 549.9 MB, 1.0 GB is free: enough",
            "CPU",
        ),
        *("ms", "ranks", "./outputs"),
    ):
        assert part in text
    large = dataclasses.replace(model, num_layers=300)
    assert "free: NOT enough: the run would be refused" in "\n".join(
        plan(config, large, device="CPU", slots=1, length=256)
    )
    ascend = "\n".join(plan(config, model, device="Ascend", slots=1, length=256))
    assert "float16" in ascend and "free" not in ascend


def test_sizes_for_people() -> None:
    assert [readable(n) for n in (999, 538_100_000, 4 * 10**12)] == ["999 B", "538.1 MB", "4.0 TB"]
