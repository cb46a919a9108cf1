"""run_mode=export: a model as MindIR (or .ms), verified in the engine that it is for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lite_runner import progress
from lite_runner.backends.lite.export.job import ExportJob, job_of_export
from lite_runner.backends.lite.export.output_paths import OutputPaths, output_paths
from lite_runner.backends.lite.export.writer import export_artifact
from lite_runner.backends.mindformers.export import export_with_mindformers
from lite_runner.config.artifact_checks import ExportOptions as Config
from lite_runner.config.artifact_checks import export_faults as faults
from lite_runner.config.parallel import Ranks, check_divides, ranks_of
from lite_runner.model.adapters import with_adapter
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan, described
from lite_runner.plan.resources import files_to_fetch, with_seat
from lite_runner.sizing.memory import check_memory

__all__ = ["Config", "faults", "plan", "run"]


def plan(config: Config) -> Plan:
    """Files, what is exported and where, and the memory it takes. With dry_run=true nothing is
    fetched. Raises RunnerError."""
    began = time.perf_counter()
    ranks = ranks_of(config)
    if (planned_files := files_to_fetch(config)) is not None:
        export, paths = _job_and_paths(config, with_adapter(planned_files, config), ranks)
        check_memory(export.memory)
    files = with_adapter(locate_for_plan(config), config)
    check_divides(config, files.model)
    if ranks.size > 1 and not config.dry_run:
        replace(files, auto_trans=True).check_layout(ranks, vocab_parallel=config.vocab_parallel)
    export, paths = _job_and_paths(config, files, ranks)
    spec, engine = export.spec, export.engine
    writes = f"{paths.folder}: {spec.layout}, {spec.model_type}, verified in {engine.name}"
    planned = Plan(
        config=config,
        device=engine.device,
        dtype="float32, while it is written",
        ranks=ranks,
        files=files,
        job=Job.without_prompts(spec.slots, spec.length),
        memory=export.memory,
        lines={"writes": writes},
    )
    if config.in_mindformers:
        planned = with_seat(planned, planned.work)
    elif config.dry_run:
        return described(planned)
    return replace(planned, seconds=time.perf_counter() - began)


def _job_and_paths(
    config: Config, files: ModelFiles, ranks: Ranks
) -> tuple[ExportJob, OutputPaths]:
    """Raises ConfigError where something stands at the paths."""
    export = job_of_export(config, files, ranks, slots=config.predict_batch_size or 1)
    paths = output_paths(export, config.export_output, overwrite=config.overwrite)
    paths.check()
    return export, paths


def run(plan: Plan, folder: RunFolder, interrupted: Callable[[], bool] | None = None) -> None:
    """Write the artifact. Raises RunnerError; nothing half-written gets the final name.

    Of several ranks, which have met and each call this, each writes its graphs; an export is not
    `interrupted` between steps.
    """
    began = time.perf_counter() - plan.seconds
    config, ranks = plan.config, plan.ranks
    assert isinstance(config, Config)
    files = with_adapter(plan.model, config)
    tokenizer = tokenizer_of(config, files)
    job = job_of_export(config, files, ranks, tokenizer, slots=plan.work.slots)
    spec, engine = job.spec, job.engine
    if spec.target != engine.device:
        progress.note(
            f"for {spec.target}, which is not here: the graphs are verified in {engine.name} on "
            f"{engine.device}"
        )
    if spec.layout == "full" and config.use_past:
        progress.note(
            "a full graph alone, without a cache: infer.increment_model_path= writes a pair"
        )
    paths = output_paths(job, config.export_output, overwrite=config.overwrite)
    write = export_with_mindformers if config.in_mindformers else export_artifact
    manifest = write(job, paths)
    if ranks.rank > 0:
        return
    folder.write_result(
        Result.of_files(config, files.source, began, engine=engine.name, world_size=ranks.size)
    )
    written = [(paths.folder / name).stat() for name in manifest.files]
    size = sum({(one.st_dev, one.st_ino): one.st_size for one in written}.values())
    if paths.stems is not None or ranks.size > 1:
        names = [file for graph in manifest.graphs.values() for file in graph.files]
        progress.note(f"graphs: {', '.join(str(paths.folder / name) for name in names)}")
    progress.note(
        f"wrote {paths.folder}: {spec.layout}, {size / 1e6:.0f} MB, runs in engine={engine.name}"
    )
