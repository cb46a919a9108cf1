"""Whether this machine can hold its ranks: asked before any of them is started."""

from __future__ import annotations

from lite_runner import environment
from lite_runner.config.cluster import cluster_of
from lite_runner.config.model import ModelConfig
from lite_runner.config.plan import free_memory, readable
from lite_runner.config.scaling import PROCESS_BYTES, machine_memory
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault


def check_machine(
    config: RunConfig, model: ModelConfig, *, slots: int, length: int, adapters: int = 0
) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory for what each rank
    holds: its part of the weights, a cache of `slots` sequences of `length` tokens, and `adapters`
    bytes of those that are loaded at a time."""
    device = environment.resolve_device(config.context.device_target)
    if device != "CPU":
        count, devices = cluster_of(config).local_worker_num, environment.ascend_devices()
        if count > devices:
            raise EnvironmentFault(
                f"{count} ranks on this machine need {count} Ascend devices, and it has {devices}",
                "a smaller parallel group, or more machines: parallel.local_worker_num=",
            )
        return
    need = machine_memory(
        config, model, device=device, slots=slots, length=length, adapters=adapters
    )
    free = free_memory()
    if need.total > free:
        rank = need.rank
        raise EnvironmentFault(
            f"memory: {need.ranks} ranks with {readable(rank.weights)} of weights and"
            f" {readable(rank.cache)} of cache"
            + (f" and {readable(adapters)} of adapters" if adapters else "")
            + f" each, and MindSpore's own {readable(PROCESS_BYTES)} in {need.processes} processes,"
            f" need {readable(need.total)}, but {readable(free)} is free",
            "fewer ranks or a smaller model, or a machine with more memory",
        )
