"""run_mode=export: a model as MindIR (or .ms), verified in the engine that it is for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from lite_runner import progress
from lite_runner.config.cluster import ranks_of
from lite_runner.config.export_checks import ExportOptions
from lite_runner.config.export_checks import export_faults as faults
from lite_runner.config.parallel import check_divides
from lite_runner.export.names import output_paths
from lite_runner.model.locate import locate_for_plan
from lite_runner.model.merged_adapter import with_adapter
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.describe import described
from lite_runner.plan.exporting import export_job, write_export
from lite_runner.plan.job import Job
from lite_runner.plan.mindformers import plan_mindformers
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass

__all__ = ["Config", "faults", "plan", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ExportOptions):
    """run_mode=export"""


def plan(config: Config) -> Plan:
    """Files, what is exported and where, and the memory it takes. With dry_run=true nothing is
    fetched. Raises RunnerError."""
    began = time.perf_counter()
    files = with_adapter(locate_for_plan(config), config)
    check_divides(config, files.model)
    ranks = ranks_of(config)
    if ranks.size > 1 and not config.dry_run:
        replace(files, auto_trans=True).check_layout(ranks, vocab_parallel=config.vocab_parallel)
    export = export_job(config, files, ranks, slots=config.predict_batch_size or 1)
    spec, engine = export.spec, export.engine
    paths = output_paths(export, config.export_output, overwrite=config.overwrite)
    paths.check()
    writes = f"{paths.folder}: {spec.layout}, {spec.model_type}, verified in {engine.name}"
    planned = Plan(
        config=config,
        device=engine.device,
        backend=config.backend,
        dtype="float32, while it is written",
        ranks=ranks,
        files=files,
        job=Job.without_prompts(spec.slots, spec.length),
        memory=export.memory,
        lines={"writes": writes},
    )
    if config.backend == "mindformers":
        planned = plan_mindformers(planned, planned.work)
    elif config.dry_run:
        return described(planned)
    return replace(planned, seconds=time.perf_counter() - began)


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
    job = export_job(config, files, ranks, tokenizer, slots=plan.work.slots)
    spec, engine = job.spec, job.engine
    if spec.target != engine.device:
        progress.note(
            f"for {spec.target}, which is not here: the graphs are verified in {engine.name} on "
            f"{engine.device}"
        )
    paths = output_paths(job, config.export_output, overwrite=config.overwrite)
    manifest = write_export(job, paths)
    if ranks.rank > 0:
        return
    folder.write_result(
        Result.of_files(config, files.source, began, engine=engine.name, world_size=ranks.size)
    )
    size = sum((paths.folder / name).stat().st_size for name in manifest.files)
    if paths.stems is not None or ranks.size > 1:
        names = [file for graph in manifest.graphs.values() for file in graph.files]
        progress.note(f"graphs: {', '.join(str(paths.folder / name) for name in names)}")
    progress.note(
        f"wrote {paths.folder}: {spec.layout}, {size / 1e6:.0f} MB, runs in engine={engine.name}"
    )
