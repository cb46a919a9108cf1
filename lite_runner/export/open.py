"""The offline backend of a run: the exported model that it names, or the one in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.backends.exported import open_exported
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.export.checks import check_fits, check_generation, check_ranks
from lite_runner.export.engine import engine_for
from lite_runner.export.job import job_of_run
from lite_runner.export.on_demand import cached_export
from lite_runner.model.files import ModelFiles
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.backends.packed import PackedOptions


def open_offline(
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    each: Sequence[GenerationConfig],
    *,
    slots: int,
    length: int,
    ranks: Ranks,
    packed: PackedOptions,
) -> Backend:
    """The backend of the exported model that the config names, or of the one in the cache, which
    is exported first where there is none; for prompts with the options `each`. Each of several
    `ranks` opens its own graphs. Raises RunnerError.
    """
    given = files.exported
    if given is not None:
        manifest, folder = given.manifest, given.folder
        check_fits(config, given, slots, length)
        engine = engine_for(config, manifest.layout, given.ge_files, ranks=ranks)
    else:
        job = job_of_run(config, files, tokenizer, slots=slots, length=length, ranks=ranks)
        engine = job.engine
        folder, manifest = cached_export(job)
    check_ranks(config, manifest, folder, engine, ranks)
    rank = ranks.tensor_index if ranks.size > 1 else config.infer.rank_id % manifest.ranks
    for generation in dict.fromkeys(each):
        check_generation(manifest, generation)
    with progress.step(f"load {folder.name} in {engine.name}"):
        graphs = manifest.paths(folder, rank)
        return open_exported(graphs, manifest, engine, slots=slots, packed=packed)
