"""The resources of a plan: operators, dtype of the weights, memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lite_runner.config.options import CompareOptions, ComputeOptions
from lite_runner.plan.describe import described
from lite_runner.plan.footprint import planned_dtype
from lite_runner.plan.job import Job
from lite_runner.plan.memory import job_memory, memory_hints
from lite_runner.plan.operators import operators_line
from lite_runner.plan.plan import Plan
from lite_runner.plan.preflight import check_machine


def with_resources(plan: Plan, share: Job) -> Plan:
    """The plan with operators, dtype and memory; with dry_run=true also the lines to print.

    `share` is the largest job of a replica. Raises EnvironmentFault where this machine cannot hold
    its ranks, and as `plan_mindformers` where the run is to be compared with MindFormers.
    """
    if plan.backend == "mindformers":
        from lite_runner.plan.mindformers import plan_mindformers

        return plan_mindformers(plan, share)
    if isinstance(plan.config, CompareOptions) and plan.config.compare_backend == "mindformers":
        from lite_runner.plan.mindformers import check_comparison

        check_comparison(plan, share)
    config, device, ranks, files = plan.config, plan.device, plan.ranks, plan.model
    assert isinstance(config, ComputeOptions)
    online = files.exported is None and config.backend == "ms"
    hints = partial(memory_hints, config, files, share, device, ranks)
    # An exported model is opened without it, and counting takes reading the checkpoint's header.
    asked = online or config.dry_run or ranks.size > 1
    need = job_memory(config, files, share, device, ranks) if asked else None
    plan = replace(
        plan,
        why=operators_line(config, files, device, ranks) if online else "",
        dtype=planned_dtype(config, files, device, ranks),
        memory=need,
    )
    if config.dry_run:
        return described(replace(plan, job=share), hints)
    if ranks.size > 1:
        assert need is not None
        check_machine(config, need, hints)
    return plan
