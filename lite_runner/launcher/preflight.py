"""Whether this machine can hold its ranks: asked before any of them is started."""

from __future__ import annotations

from lite_runner import environment
from lite_runner.config.cluster import Cluster
from lite_runner.config.model import ModelConfig
from lite_runner.config.plan import BYTES_OF, free_memory, readable
from lite_runner.config.scaling import PROCESS_BYTES, host_processes, rank_parameters
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EnvironmentFault


def check_machine(config: RunConfig, cluster: Cluster, model: ModelConfig) -> None:
    """Raises EnvironmentFault for too few devices or, on CPU, too little memory."""
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
    parameters = rank_parameters(model, cut.model_parallel, vocab_parallel=not cut.vocab_emb_dp)
    weights = parameters * BYTES_OF[config.compute_dtype(device)]
    processes = host_processes(count, master=cluster.is_master)
    need, free = count * weights + processes * PROCESS_BYTES, free_memory()
    if need > free:
        raise EnvironmentFault(
            f"memory: {count} ranks with {readable(weights)} of weights each, and MindSpore's own"
            f" {readable(PROCESS_BYTES)} in {processes} processes, need {readable(need)}, but"
            f" {readable(free)} is free",
            "fewer ranks or a smaller model, or a machine with more memory",
        )
