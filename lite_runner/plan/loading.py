"""Loading the backend of a run, online or of an exported model."""

from __future__ import annotations

from lite_runner import progress
from lite_runner.backends import ascend_context
from lite_runner.backends.base import Backend
from lite_runner.config.ascend import AscendSettings
from lite_runner.config.options import ComputeOptions, ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.plan.job import Job
from lite_runner.sizing.need import Memory
from lite_runner.text.tokenizer import Tokenizer


def load(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    job: Job,
    tokenizer: Tokenizer | None = None,
    ranks: Ranks | None = None,
    need: Memory | None = None,
) -> Backend:
    """The backend with its weights, after checking memory; `need`: the memory of the job, if known.

    Several `ranks` must have joined; the launcher has checked that they fit together. `tokenizer`
    is written beside a model that an offline backend has to export first. Raises RunnerError.
    """
    ranks = ranks or Ranks()
    ascend_context.choose(AscendSettings.of(config.context), device, tell=ranks.rank == 0)
    if files.source == RANDOM and files.exported is None and files.held is None:
        progress.note("load_checkpoint=random: the weights are noise, and so is the text")
    if isinstance(config, ExportedOptions) and config.backend == "mslite":
        from lite_runner.plan.offline import load_offline

        return load_offline(config, files, job, tokenizer, ranks)
    from lite_runner.plan.online import load_online

    return load_online(config, files, device, job, ranks, need)
