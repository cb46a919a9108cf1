"""The backend of a run, online or through an exported model: which one, and loading it."""

from __future__ import annotations

from dataclasses import replace

from lite_runner import progress
from lite_runner.backends import ascend_context
from lite_runner.backends.base import Backend
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.options import ComputeOptions, Exported, ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.plan.job import Job
from lite_runner.plan.online import load_online
from lite_runner.sizing.need import Memory
from lite_runner.text.tokenizer import Tokenizer


def with_backend(config: Exported, files: ModelFiles, job: Job) -> Exported:
    """The config with backend=auto decided."""
    if config.backend != "auto":
        return config
    quantized = files.quantization.quant != "none" and files.given is None
    scored = job.scored and files.given is None
    if job.adapters is not None or quantized or scored:
        return replace(config, backend="ms")
    from lite_runner.export.cache import chosen_backend

    backend = chosen_backend(config, files, job.generation, slots=job.slots, length=job.length)
    return replace(config, backend=backend)


def load(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    job: Job,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
    need: Memory | None = None,
) -> Backend:
    """The backend with its weights, once it is sure that they fit; `need`: the memory of the job,
    where it is counted already.

    `ranks`, where there are several, must have met; whether all their parts fit is the launcher's
    to check. Exporting a model, where an offline backend has none yet, takes its `tokenizer` along.
    """
    ranks = ranks or Ranks()
    ascend_context.choose(AscendSettings.of(config.context), device, tell=ranks.rank == 0)
    if files.source == RANDOM and files.given is None and files.held is None:
        progress.note("load_checkpoint=random: the weights are noise, and so is the text")
    if isinstance(config, ExportedOptions) and config.backend == "mslite":
        from lite_runner.export.open import open_offline

        return open_offline(
            config,
            files,
            tokenizer,
            job.each,
            slots=job.slots,
            length=job.length,
            ranks=ranks,
        )
    return load_online(config, files, device, job, ranks, need)
