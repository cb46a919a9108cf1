"""Loading the online backend of a run: native operators, or MindSpore's."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.config.options import ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan.capacity import capacity_for
from lite_runner.plan.job import Job
from lite_runner.plan.memory import job_memory, memory_hints
from lite_runner.plan.opening import open_backend
from lite_runner.plan.operators import resolve_operators
from lite_runner.sizing.need import Memory, check_memory
from lite_runner.weights.quantization.quantize import block_types, describe, describe_blocks


def load_online(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    job: Job,
    ranks: Ranks,
    need: Memory | None = None,
) -> Backend:
    """The backend with its weights, after checking operators and memory; `need`: the memory of the
    job, if known. Raises RunnerError."""
    native = resolve_operators(config, files, device, ranks)
    files = replace(files, rounded=config.rounded_dtype(device))
    if device == "CPU" and ranks.size == 1:
        check_memory(
            need or job_memory(config, files, job, device, ranks),
            lambda: memory_hints(config, files, job, device, ranks),
        )
    capacity = capacity_for(config, files.model, job, ranks)
    tensors = files.tensors(ranks, vocab_parallel=config.vocab_parallel)
    if files.quantization.rounds:
        progress.note(describe(tensors, files.quantization))
    elif native and (types := block_types(tensors)):
        progress.note(describe_blocks(types))
    name = f"load {files.path.name}" if files.path else "make random weights"
    if files.held is not None:
        name = "take the weights from the parameters"
    with progress.step(name, total=len(tensors), unit="tensors") as step:
        return open_backend(
            config, files, device, ranks, tensors, capacity, step.advance, native=native
        )
