"""The resources of a plan: what computes, dtype of the weights, memory; and opening it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.backends.mindspore.device import choose_ascend_settings
from lite_runner.backends.seat import RunOptions, seat
from lite_runner.config.schema import CompareOptions, ComputeOptions
from lite_runner.config.sections import AscendSettings
from lite_runner.errors import ConfigError
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.plan.backend import other_config, others, run_options
from lite_runner.plan.job import Job
from lite_runner.plan.memory import memory_hints
from lite_runner.plan.plan import Plan, described
from lite_runner.sizing.memory import Memory, MemoryHint, check_memory


def with_resources(plan: Plan, share: Job) -> Plan:
    """The plan with what computes, dtype and memory; with dry_run=true also the lines to print.

    `share` is the largest job of a replica. Raises ConfigError where the backend, or that of
    compare_backend=, cannot compute the run, EnvironmentFault where one of them is not here.
    """
    config = plan.config
    if config.dry_run:
        told = others(plan.model, options_of(plan, share))
        plan = replace(plan, lines={**plan.lines, "others": told})
    if isinstance(config, CompareOptions):
        _check_comparison(plan, config, share)
    return with_seat(plan, share)


def with_seat(plan: Plan, share: Job) -> Plan:
    """As `with_resources`, by the plan's own backend alone."""
    config, device, ranks, files = plan.config, plan.device, plan.ranks, plan.model
    assert isinstance(config, ComputeOptions)
    options, chosen = options_of(plan, share), seat(plan.backend)
    chosen.check(files, options)
    # An exported model is opened without it, and counting takes reading the checkpoint's header.
    asked = files.exported is None or config.dry_run or ranks.size > 1
    plan = replace(
        plan,
        why=chosen.describe(files, options),
        dtype=chosen.dtype(files, options) if config.dry_run else "",
        memory=chosen.memory(files, options) if asked else None,
    )
    if config.dry_run:
        hints = partial(memory_hints, config, files, share, device, ranks)
        plan = described(replace(plan, job=share), hints)
        return replace(plan, table=(*plan.table, *chosen.details(files, options)))
    return plan


def _check_comparison(plan: Plan, config: CompareOptions, share: Job) -> None:
    """Check that the backend of compare_backend= can compute the run. Raises ConfigError."""
    if (name := config.compare_backend) is None:
        return
    plan = replace(plan, config=other_config(config))
    options, other = options_of(plan, share), seat(name)
    # What an exported model was made from is not located yet.
    if plan.model.exported is None and (why := other.unsupported(plan.model, options)):
        raise ConfigError(f"compare_backend={name}: {'; '.join(why)}")
    other.check(plan.model, options)


def options_of(plan: Plan, job: Job | None = None) -> RunOptions:
    """What the plan's job, or a replica's share of it, asks of a backend."""
    config = plan.config
    assert isinstance(config, ComputeOptions)
    return run_options(config, job or plan.work, plan.device, plan.ranks, plan.tokenizer)


def open_planned(plan: Plan, job: Job | None = None) -> Backend:
    """The backend with its weights, for the plan's job or a replica's share of it. Raises
    RunnerError."""
    files, options = plan.model, options_of(plan, job)
    hints = partial(memory_hints, options.config, files, job or plan.work, plan.device, plan.ranks)
    return open_backend(files, options, plan.memory, hints)


def open_backend(
    files: ModelFiles,
    options: RunOptions,
    need: Memory | None = None,
    hints: Callable[[], Sequence[MemoryHint]] = list,
) -> Backend:
    """The backend of a config that names one, with its weights.

    `need`: the memory of the run, if known; `hints` is called where it does not suffice. Several
    ranks must have joined; the launcher has checked that they fit together. Raises RunnerError.
    """
    config, first = options.config, options.ranks.rank == 0
    choose_ascend_settings(AscendSettings.of(config.context), options.device, tell=first)
    if files.source == RANDOM and files.exported is None and files.held is None:
        progress.note("load_checkpoint=random: the weights are noise, and so is the text")
    chosen = seat(config.backend)
    if chosen.elastic and options.device == "CPU" and options.ranks.size == 1:
        check_memory(need or chosen.memory(files, options), hints)
    return chosen.open(files, options)
