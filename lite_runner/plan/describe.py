"""The lines that dry_run=true prints for a run that computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lite_runner.plan.plan import Plan
from lite_runner.sizing.need import MemoryHint, memory_lines, model_lines, readable
from lite_runner.sizing.scaling import ranks_plan


def described(plan: Plan, hints: Callable[[], Sequence[MemoryHint]] = list) -> Plan:
    """The plan with the lines of dry_run=true; `hints` is called where memory does not suffice."""
    config, model, job, need = plan.config, plan.model.model, plan.work, plan.memory
    assert need is not None
    each = " in each rank" if config.use_parallel else ""
    lines = model_lines(config, model, plan.model.location()) | {
        "weights": f"{readable(need.weights)} as {plan.dtype}{each}",
        "cache": f"{readable(need.cache)} for {job.slots} x {job.length} tokens{each}"
        if config.use_past
        else "none (use_past=false)",
    }
    if need.adapters:
        lines["adapters"] = f"{readable(need.adapters)} for those loaded at a time"
    if not need.process:
        lines["memory"] = f"needs {readable(need.total)} on each device; what one has is not known"
    elif not config.use_parallel:
        lines |= memory_lines(need, hints)
    lines["backend"] = plan.backend
    if plan.why:
        lines["operators"] = plan.why
    lines |= {
        "device": plan.device,
        "ranks": str(plan.ranks.size),
        "output": config.output_dir,
    }
    table: tuple[str, ...] = ()
    if config.use_parallel and config.on_ranks and not plan.writes_graphs:
        sizes = {"slots": job.slots, "length": job.length}
        table = tuple(ranks_plan(config, model, need, device=plan.device, **sizes))
    return replace(plan, lines={**lines, **plan.lines}, table=table)
