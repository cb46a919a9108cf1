"""What a backend has room for: rows, their tokens, and adapters at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lite_runner.architectures.spec import Decoder
from lite_runner.config.options import AdapterSlotOptions, ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.adapters import pieces_of, pool_bytes
from lite_runner.native.lora_pool import LoraSize, pool_size
from lite_runner.plan.job import Job
from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True)
class Capacity:
    """The room of a backend, and the adapters that it knows from the start."""

    slots: int  # rows
    length: int  # tokens of a row
    adapters: Sequence[Adapter] = ()  # what this rank holds of each
    lora: LoraSize | None = None  # None: the base model alone


def capacity_for(config: ComputeOptions, model: Decoder, job: Job, ranks: Ranks) -> Capacity:
    """The capacity for a job, its adapters cut for this rank. Raises ArtifactError."""
    if job.adapters is None or not isinstance(config, AdapterSlotOptions):
        return Capacity(job.slots, job.length)
    adapters = pieces_of(job.adapters, config, model, ranks)
    if not adapters:
        return Capacity(job.slots, job.length)
    lora = pool_size(
        adapters, adapter_slots_for(config, job), rounded=config.adapter_dtype == "bf16"
    )
    return Capacity(job.slots, job.length, adapters, lora)


def adapter_slots_for(config: AdapterSlotOptions, job: Job) -> int:
    """Adapters to hold on the device at a time; by default as many as can run together."""
    if job.adapters is None:
        return 0
    together = job.slots // max(job.generation.num_beams, job.generation.num_return_sequences)
    return min(config.max_loaded_adapters or max(1, together), len(job.adapters.adapters))


def adapter_bytes(
    config: AdapterSlotOptions, model: Decoder, job: Job, device: str, ranks: Ranks
) -> int:
    """What the adapters of this rank's job take on its device."""
    if job.adapters is None:
        return 0
    slots, dtype = adapter_slots_for(config, job), config.compute_dtype(device)
    if config.adapter_dtype == "bf16":
        dtype = "bfloat16"
    return pool_bytes(job.adapters, config, model, ranks, slots, dtype)
