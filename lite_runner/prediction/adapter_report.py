"""What a run did with its LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.backends.base import AdapterSlots
from lite_runner.config.prompt import BASE
from lite_runner.generation import Generation
from lite_runner.output.report import AdapterReport, AdapterUse, RowResult
from lite_runner.plan.job import Job


def adapter_report(
    job: Job, rows: Sequence[RowResult], outcome: Generation, slots: AdapterSlots | None
) -> AdapterReport | None:
    """Prompts, tokens and seconds of each adapter; None for a run without adapters."""
    if job.adapters is None:
        return None
    used = {}
    wanted = [job.adapters.name(place) for place in range(len(job.tokens))]
    for adapter in (None, *job.adapters.adapters):
        name = None if adapter is None else adapter.name
        mine = [row for row in rows if row.adapter == name]
        used[name or BASE] = AdapterUse(
            modules=0 if adapter is None else len(adapter.pairs),
            prompts=wanted.count(name),
            prompt_tokens=sum(row.prompt_tokens for row in mine),
            generated_tokens=sum(row.generated_tokens for row in mine),
            seconds=outcome.adapter_s.get(name, 0.0),
        )
    if slots is None:
        return AdapterReport(0, 0, 0, used)
    return AdapterReport(slots.slots, slots.nbytes, slots.loads, used)
