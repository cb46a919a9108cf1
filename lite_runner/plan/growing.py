"""A loaded backend that makes room for a larger job."""

from __future__ import annotations

from dataclasses import replace

from lite_runner.architectures import custom_network
from lite_runner.backends.base import Backend, Growing
from lite_runner.config.options import GenerateOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan.capacity import adapter_slots_for
from lite_runner.plan.job import Job
from lite_runner.plan.memory import memory_need
from lite_runner.sizing.need import Memory, check_memory


def grown(
    backend: Backend, config: GenerateOptions, files: ModelFiles, device: str, job: Job
) -> bool:
    """Make room in a backend for what the job has, without reading a weight again; False where it
    cannot: for exported graphs, registered networks, and more adapters at a time than it holds.

    Raises EnvironmentFault where the larger cache does not fit.
    """
    if not isinstance(backend, Growing) or custom_network(files.model):
        return False
    if backend.adapters is not None and backend.adapters.slots < adapter_slots_for(config, job):
        return False
    if device == "CPU":
        info = backend.info
        held = replace(job, slots=info.slots, length=info.max_length)
        now, then = (memory_need(config, files, one, device, Ranks()).cache for one in (held, job))
        check_memory(Memory(0, max(0, then - now)))
    backend.grow(job.slots, job.length)
    return True
