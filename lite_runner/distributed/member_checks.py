"""Validation errors of a config in a job that another launcher started."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import Fault
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.membership import Member


def member_faults(config: RunConfig, member: Member) -> Iterator[Fault]:
    """Validation errors of `config` with the number of ranks that were started."""
    ranks, asked = ranks_of(config), config.parallel_config
    started = f"this process was started as {member.name}"
    if not config.on_ranks and member.size > 1:
        yield Fault(
            ("run_mode",), f"{started}, but run_mode={config.run_mode} is done by one process"
        )
    elif member.size == ranks.size:
        return
    elif not config.use_parallel:
        yield Fault(
            ("use_parallel",),
            f"{started}, but use_parallel=false: each would do the whole job; use_parallel=true"
            f" with parallel_config.model_parallel={member.size}, or start one process",
        )
    else:
        yield Fault(
            ("parallel_config",),
            f"{started}, expected {ranks.size}: data_parallel={asked.data_parallel} *"
            f" model_parallel={asked.model_parallel} of parallel_config; start {ranks.size}, or"
            f" set parallel_config.model_parallel={member.size} and data_parallel=1",
        )
