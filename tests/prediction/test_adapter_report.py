"""What a run says of each adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Request
from lite_runner.generation import Generation
from lite_runner.model.adapters import AdapterJob
from lite_runner.output.report import AdapterReport, AdapterUse, RowResult
from lite_runner.plan.job import Job
from lite_runner.prediction.adapter_report import adapter_report


def row(adapter: str | None, prompt: int, made: int) -> RowResult:
    return RowResult("p", "t", [1] * made, prompt, made, "length", adapter=adapter)


def test_each_adapter_and_the_base_have_their_own() -> None:
    """Prompts are counted once, however many sequences each has; one that nobody asks for is 0."""
    names = ["en", None, "en"]
    adapters = [SimpleNamespace(name="en", pairs=range(8)), SimpleNamespace(name="zh", pairs=[1])]
    job = Job(
        [Request("p")] * 3,
        [[1]] * 3,
        GenerationConfig(max_new_tokens=4),
        slots=2,
        length=9,
        adapters=AdapterJob(cast("Any", adapters), names),
    )
    rows = [row("en", 3, 4), row("en", 3, 2), row(None, 5, 1), row("en", 7, 8)]
    outcome = Generation([], adapter_s={"en": 1.5, None: 0.25})
    slots = SimpleNamespace(slots=2, nbytes=100, loads=3)
    used = {
        "base": AdapterUse(0, 1, 5, 1, 0.25),
        "en": AdapterUse(8, 2, 13, 14, 1.5),
        "zh": AdapterUse(1, 0, 0, 0, 0.0),
    }
    found = adapter_report(job, rows, outcome, cast("Any", slots))
    assert found == AdapterReport(2, 100, 3, used)
    assert adapter_report(job, rows, outcome, None) == AdapterReport(0, 0, 0, used)


def test_a_run_without_adapters_has_none() -> None:
    job = Job((), (), GenerationConfig(max_new_tokens=4), slots=1, length=9)
    assert adapter_report(job, (), Generation([]), None) is None
