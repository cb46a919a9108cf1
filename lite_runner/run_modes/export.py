"""run_mode=export: a model as MindIR (or .ms), verified in the engine that it is for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from lite_runner import progress
from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.cluster import ranks_of
from lite_runner.config.fields import Fault, fault, raise_faults
from lite_runner.config.ge import ge_faults
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import (
    AdapterOptions,
    BatchOptions,
    ExportedOptions,
    OverwriteOptions,
)
from lite_runner.config.parallel import DATA_KEYS, division_faults
from lite_runner.export.job import job_of_export
from lite_runner.export.memory import export_memory
from lite_runner.export.names import output_paths
from lite_runner.export.writer import export_artifact
from lite_runner.model import model_files
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.describe import described
from lite_runner.plan.job import Job
from lite_runner.plan.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Config(ExportedOptions, BatchOptions, AdapterOptions, OverwriteOptions):
    """run_mode=export"""

    writes_graphs: ClassVar[bool] = True

    export_output: str  # "": named in output_dir


def faults(config: Config) -> Iterator[Fault]:
    """Validation errors of an export."""
    infer = config.infer
    if infer.model_dir:
        yield fault("infer.model_dir", "infer.model_dir is read; give export_output=FOLDER")
    if config.export_output and (infer.prefill_model_path or infer.increment_model_path):
        yield fault(
            ("export_output", "infer.prefill_model_path", "infer.increment_model_path"),
            "export_output and infer.prefill_model_path both say where to write; give one of them",
        )
    if config.use_parallel and (replicas := config.parallel_config.data_parallel) > 1:
        yield fault(
            (*DATA_KEYS, "run_mode"),
            f"parallel_config.data_parallel: got {replicas}, expected 1 with run_mode=export: all"
            " replicas run the same graphs",
        )
    yield from adapter_faults(config, one=True)
    yield from strategy_faults(config)
    yield from offline_faults(config)
    yield from ge_faults(config)


def plan(config: Config) -> Plan:
    """Files, what is exported and where, and the memory it takes. With dry_run=true nothing is
    fetched. Raises RunnerError."""
    began = time.perf_counter()
    files = model_files.with_adapter(model_files.find(config), config)
    raise_faults(list(division_faults(config, files.model)))
    ranks = ranks_of(config)
    if ranks.size > 1 and not config.dry_run:
        files.cut(ranks, vocab_parallel=config.vocab_parallel)
    export = job_of_export(config, files, ranks, slots=config.predict_batch_size or 1)
    spec, engine = export.spec, export.engine
    paths = output_paths(export, config.export_output, overwrite=config.overwrite)
    paths.check()
    job = Job((), (), GenerationConfig(), spec.slots, spec.length)
    writes = f"{paths.folder}: {spec.layout}, {spec.model_type}, verified in {engine.name}"
    planned = Plan(
        config=config,
        device=engine.device,
        backend=config.backend,
        dtype="float32, while it is written",
        ranks=ranks,
        files=files,
        job=job,
        memory=export_memory(files, spec),
        lines={"writes": writes},
    )
    if config.dry_run:
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
    files = model_files.with_adapter(plan.model, config)
    tokenizer = model_files.tokenizer_of(config, files)
    job = job_of_export(config, files, ranks, tokenizer, slots=plan.work.slots)
    spec, engine = job.spec, job.engine
    if spec.target != engine.device:
        progress.note(
            f"for {spec.target}, which is not here: the graphs are verified in {engine.name} on "
            f"{engine.device}"
        )
    paths = output_paths(job, config.export_output, overwrite=config.overwrite)
    manifest = export_artifact(job, paths)
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
