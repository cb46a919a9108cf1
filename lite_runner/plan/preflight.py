"""Whether this machine can hold its ranks, checked before any of them is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lite_runner.config.cluster import cluster_of
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.sizing.need import Memory, MemoryHint, memory_remedy, readable, shortage
from lite_runner.sizing.scaling import machine_memory
from lite_runner.system import environment, memory


def check_machine(
    config: RunConfig, rank: Memory, hints: Callable[[], Sequence[MemoryHint]] = list
) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory; `hints` is called
    only then."""
    device = environment.resolve_device(config.context.device_target)
    if device != "CPU":
        count, devices = cluster_of(config).local_worker_num, environment.ascend_devices()
        if count > devices:
            raise EnvironmentFault(
                f"{count} ranks on this machine need {count} Ascend devices, and it has {devices}",
                "a smaller parallel group, or more machines: parallel.local_worker_num=",
            )
        return
    need, free = machine_memory(config, rank), memory.free_memory()
    if need.total > free:
        raise EnvironmentFault(
            f"memory: {need}, need {readable(need.total)}, but {readable(free)} is free",
            memory_remedy(hints()),
        )
    if (found := shortage(rank)) is not None:  # a rank's own limit, of its address space
        raise EnvironmentFault(f"memory: each rank {found}", memory_remedy(hints()))
