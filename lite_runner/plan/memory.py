"""Memory that a job needs, and settings that reduce it."""

from __future__ import annotations

from dataclasses import replace

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.step_sizes import rows_at_once, step_capacity, unchunked
from lite_runner.config.options import AdapterSlotOptions, ComputeOptions, ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan import footprint
from lite_runner.plan.capacity import adapter_bytes
from lite_runner.plan.job import Job
from lite_runner.plan.operators import uses_native_operators
from lite_runner.sizing.need import Memory, MemoryHint


def job_memory(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> Memory:
    """Memory of this rank's `job`: on CPU of its process, else on its device."""
    pool = 0
    if isinstance(config, AdapterSlotOptions):
        pool = adapter_bytes(config, files.model, job, device, ranks)
    if device != "CPU":
        return footprint.device_memory(config, files, device, ranks, job.slots, job.length, pool)
    native = uses_native_operators(config, files, device, ranks)
    rows = _rows_of_logits(config, files.model, job)
    if _is_packed(config, files):
        return footprint.packed_memory(config, files, job.slots, job.length, pool, rows)
    if files.exported is not None or config.backend == "mslite":
        return footprint.exported_memory(config, files, job.slots, job.length)
    return footprint.process_memory(
        config,
        files,
        ranks,
        native=native,
        slots=job.slots,
        length=job.length,
        adapters=pool,
        logits=rows,
    )


def _is_packed(config: ComputeOptions, files: ModelFiles) -> bool:
    """Whether the run is of packed layers: those it names, or those in the cache."""
    if files.exported is not None:
        return files.exported.manifest.layout == "packed"
    return (
        isinstance(config, ExportedOptions) and config.backend == "mslite" and config.takes_packed
    )


def _rows_of_logits(config: ComputeOptions, model: Decoder, job: Job) -> int:
    """Maximum rows of logits that a step returns."""
    if not job.needs_prompt_logits:
        return job.slots
    longest = max(job.length, step_capacity(job.slots, unchunked(model, job.length)))
    return rows_at_once(model.vocab_size, longest) if config.use_past else job.length


def memory_hints(
    config: ComputeOptions, files: ModelFiles, job: Job, device: str, ranks: Ranks
) -> list[MemoryHint]:
    """Settings with which the job needs less memory."""
    native = device == "CPU" and uses_native_operators(config, files, device, ranks)
    width = max(job.generation.num_beams, job.generation.num_return_sequences)

    def need(change: footprint.Change) -> Memory:
        slots = min(job.slots, width) if change.single_row else job.slots
        length = job.length // 2 if change.half_length else job.length
        smaller = replace(job, slots=slots, length=length)
        return job_memory(change.config, change.files, smaller, device, ranks)

    return footprint.hints(config, files, need, native=native, slots=job.slots, length=job.length)
