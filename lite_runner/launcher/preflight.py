"""Whether this machine can hold its ranks: asked before any of them is started."""

from __future__ import annotations

from lite_runner import environment
from lite_runner.config.cluster import Cluster
from lite_runner.config.model import ModelConfig
from lite_runner.config.plan import free_memory, readable
from lite_runner.config.scaling import PROCESS_BYTES, host_processes, rank_memory
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault


def check_machine(
    config: RunConfig, cluster: Cluster, model: ModelConfig, *, slots: int, length: int
) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory for weights and
    caches of `slots` sequences of `length` tokens in each copy of the model."""
    device = environment.resolve_device(config.context.device_target)
    count = cluster.local_worker_num
    if device != "CPU":
        devices = environment.ascend_devices()
        if count > devices:
            raise EnvironmentFault(
                f"{count} ranks on this machine need {count} Ascend devices, and it has {devices}",
                "a smaller parallel group, or more machines: parallel.local_worker_num=",
            )
        return
    cut = config.parallel_config
    rank = rank_memory(
        model,
        config.compute_dtype(device),
        cut.model_parallel,
        slots,
        length,
        use_past=config.use_past,
        vocab_parallel=config.vocab_parallel,
    )
    processes = host_processes(count, master=cluster.is_master)
    need, free = count * rank.total + processes * PROCESS_BYTES, free_memory()
    if need > free:
        raise EnvironmentFault(
            f"memory: {count} ranks with {readable(rank.weights)} of weights and"
            f" {readable(rank.cache)} of cache each, and MindSpore's own {readable(PROCESS_BYTES)}"
            f" in {processes} processes, need {readable(need)}, but {readable(free)} is free",
            "fewer ranks or a smaller model, or a machine with more memory",
        )
