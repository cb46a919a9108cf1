"""The capacity of a backend: rows, tokens per row, loaded adapters."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.architectures.spec import Decoder
from lite_runner.config.options import AdapterSlotOptions, ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.adapters import pool_bytes, rank_adapters
from lite_runner.native.lora_pool import LoraSize, pool_size
from lite_runner.plan.job import Job
from lite_runner.records import dataclass
from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True)
class Capacity:
    """The sizes of a backend, and its initial adapters."""

    slots: int  # rows
    length: int  # tokens per row
    adapters: Sequence[Adapter] = ()  # this rank's shard of each
    lora: LoraSize | None = None  # None: the base model alone


def capacity_for(config: ComputeOptions, model: Decoder, job: Job, ranks: Ranks) -> Capacity:
    """The capacity for a job, its adapters sharded for this rank. Raises ArtifactError."""
    if job.adapters is None or not isinstance(config, AdapterSlotOptions):
        return Capacity(job.slots, job.length)
    adapters = rank_adapters(job.adapters, config, model, ranks)
    if not adapters:
        return Capacity(job.slots, job.length)
    lora = pool_size(
        adapters, adapter_slots_for(config, job), rounded=config.adapter_dtype == "bf16"
    )
    return Capacity(job.slots, job.length, adapters, lora)


def adapter_slots_for(config: AdapterSlotOptions, job: Job) -> int:
    """Adapters to keep loaded on the device; by default as many as can run in one batch."""
    if job.adapters is None:
        return 0
    concurrent = job.slots // max(job.generation.num_beams, job.generation.num_return_sequences)
    return min(config.max_loaded_adapters or max(1, concurrent), len(job.adapters.adapters))


def adapter_bytes(
    config: AdapterSlotOptions, model: Decoder, job: Job, device: str, ranks: Ranks
) -> int:
    """Bytes of this rank's adapter pool on its device."""
    if job.adapters is None:
        return 0
    slots, dtype = adapter_slots_for(config, job), config.compute_dtype(device)
    if config.adapter_dtype == "bf16":
        dtype = "bfloat16"
    return pool_bytes(job.adapters, config, model, ranks, slots, dtype)
