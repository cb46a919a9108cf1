"""Loading the offline backend of a run: an exported model."""

from __future__ import annotations

from lite_runner.backends.base import Backend
from lite_runner.config.options import ComputeOptions, ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan.capacity import capacity_for
from lite_runner.plan.job import Job
from lite_runner.text.tokenizer import Tokenizer


def load_offline(
    config: ComputeOptions,
    files: ModelFiles,
    job: Job,
    tokenizer: Tokenizer | None,
    ranks: Ranks,
) -> Backend:
    """The backend of the exported model that the config names, or of the one in the cache.
    `tokenizer` is written beside one that has to be exported first. Raises RunnerError."""
    from lite_runner.backends.packed import PackedOptions
    from lite_runner.export.open import open_offline

    assert isinstance(config, ExportedOptions)
    room = capacity_for(config, files.model, job, ranks)
    return open_offline(
        config,
        files,
        tokenizer,
        job.options,
        slots=job.slots,
        length=job.length,
        ranks=ranks,
        packed=PackedOptions(job.length, config.kv_cache, room.lora, room.adapters),
    )
