"""The memory of a run, and which settings would make it smaller."""

from __future__ import annotations

from dataclasses import replace

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.step_sizes import rows_at_once, step_capacity
from lite_runner.config.options import AdapterSlotOptions, ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan import footprint
from lite_runner.plan.capacity import adapter_bytes
from lite_runner.plan.job import Job
from lite_runner.plan.operators import own_operators
from lite_runner.sizing.need import Lever, Memory


def memory_need(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> Memory:
    """What this rank's `job` takes: on the CPU its process, on a device what is on that."""
    pool = 0
    if isinstance(config, AdapterSlotOptions):
        pool = adapter_bytes(config, files.model, job, device, ranks)
    if device != "CPU":
        return footprint.on_device(config, files, device, ranks, job.slots, job.length, pool)
    own = own_operators(config, files, device, ranks)
    if files.given is not None or config.backend == "mslite":
        return footprint.of_exported(config, files, job.slots, job.length)
    return footprint.of_run(
        config,
        files,
        ranks,
        own=own,
        slots=job.slots,
        length=job.length,
        adapters=pool,
        logits=_rows_of_logits(config, files.model, job),
    )


def _rows_of_logits(config: ComputeOptions, model: Decoder, job: Job) -> int:
    """Tokens after which a step gives logits, at most."""
    if not job.scored:
        return job.slots
    longest = max(job.length, step_capacity(job.slots))
    return rows_at_once(model.vocab_size, longest) if config.use_past else job.length


def memory_levers(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> list[Lever]:
    """Settings with which the job would need less; what is not offered together is left out."""
    own = device == "CPU" and own_operators(config, files, device, ranks)
    width = max(job.generation.num_beams, job.generation.num_return_sequences)

    def need(change: footprint.Change) -> Memory:
        slots = min(job.slots, width) if change.one_at_a_time else job.slots
        length = job.length // 2 if change.half_as_long else job.length
        smaller = replace(job, slots=slots, length=length)
        return memory_need(change.config, change.files, smaller, device, ranks)

    return footprint.levers(config, files, need, own=own, slots=job.slots, length=job.length)
