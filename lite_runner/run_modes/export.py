"""run_mode=export: a model written as MindIR (or .ms), and verified in the engine that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from lite_runner import progress
from lite_runner.backends.lite.export.job import ExportJob, job_of_export
from lite_runner.backends.lite.export.output_paths import OutputPaths, output_paths
from lite_runner.backends.lite.export.writer import export_artifact
from lite_runner.backends.mindformers.run import export_with_mindformers
from lite_runner.config import Invalid, invalid
from lite_runner.config.backend_checks import ENGINES, mindformers_model_errors, without_mindformers
from lite_runner.config.checks import adapter_errors, offline_errors, strategy_errors
from lite_runner.config.parallel import DATA_KEYS, check_divides
from lite_runner.config.schema import (
    AdapterOptions,
    BatchOptions,
    ExportedOptions,
    MindFormersOptions,
    OverwriteOptions,
)
from lite_runner.config.sections import Ranks
from lite_runner.model import ModelFiles
from lite_runner.model.adapters import with_adapter
from lite_runner.model.locate import locate_for_plan, tokenizer_of
from lite_runner.output import Result, RunFolder
from lite_runner.plan import Job, Plan, described
from lite_runner.plan.resources import files_to_fetch, options_of, with_seat
from lite_runner.records import OutputPath, dataclass
from lite_runner.sizing import check_memory
from lite_runner.system import environment


@dataclass(frozen=True, kw_only=True)
class Config(ExportedOptions, BatchOptions, AdapterOptions, OverwriteOptions, MindFormersOptions):
    """run_mode=export, with an adapter merged where one is named."""

    writes_graphs: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False

    export_output: OutputPath  # "": named in output_dir


def errors(config: Config) -> Iterator[Invalid]:
    """Validation errors of an export."""
    infer = config.infer
    if infer.model_dir:
        yield invalid(
            "infer.model_dir", "infer.model_dir= names a model to run; give export_output=FOLDER"
        )
    if config.export_output and (infer.prefill_model_path or infer.increment_model_path):
        yield invalid(
            ("export_output", "infer.prefill_model_path", "infer.increment_model_path"),
            "export_output and infer.prefill_model_path both say where to write; give one of them",
        )
    if config.use_parallel and (replicas := config.parallel_config.data_parallel) > 1:
        yield invalid(
            (*DATA_KEYS, "run_mode"),
            f"parallel_config.data_parallel: got {replicas}, expected 1 with run_mode=export: all"
            " replicas run the same graphs",
        )
    yield from adapter_errors(config, one=True)
    yield from strategy_errors(config)
    yield from offline_errors(config)
    if config.in_mindformers:
        yield from mindformers_model_errors(config)
        yield from _mindformers_errors(config)
    elif (release := config.mindformers_release) is not None:
        yield without_mindformers(release)


def _mindformers_errors(config: Config) -> Iterator[Invalid]:
    """Options that do not apply to graphs of MindFormers."""
    if config.use_past:
        past = "model.model_config.use_past"
        yield invalid(
            (past, "backend"),
            "backend=mindformers: its pair of graphs with a cache, which MindSpore 2.0 writes, runs"
            f" in no engine here; add {past}=false",
        )
    refused = {
        "engine": config.chosen_engine not in (None, *ENGINES["resizable"]),
        "export.layout": config.export.chosen_layout is not None,
        "export.target": config.export.target == "Ascend",
        "export.weight_fp16": config.export.weight_fp16,
        "infer.model_type": config.infer.model_type == "mindir_lite",
        "infer.enc_key": config.infer.enc_key,
        "infer.prefill_model_path": config.infer.prefill_model_path,
        "model.model_config.is_sample_acceleration": (
            config.model.model_config.is_sample_acceleration
        ),
    }
    for key, asked in refused.items():
        if asked:
            yield invalid(
                (key, "backend"),
                f"{key}: backend=mindformers exports one graph of float32 for MindSpore Lite;"
                " backend=ms does this",
            )


def plan(config: Config) -> Plan:
    """Files, what is exported and where, and the memory it takes. With dry_run=true nothing is
    fetched. Raises RunnerError."""
    began = time.perf_counter()
    ranks = config.ranks
    fetches = not config.in_mindformers
    if fetches and not config.dry_run:
        environment.check_mindspore()  # it writes the graphs
    if fetches and (planned_files := files_to_fetch(config.source)) is not None:
        export, paths = _job_and_paths(config, with_adapter(planned_files, config.adapters), ranks)
        check_memory(export.memory)
    files = with_adapter(locate_for_plan(config.source), config.adapters)
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
    """Raises ConfigError if the paths exist already."""
    export = job_of_export(config.settings, files, ranks, slots=config.predict_batch_size or 1)
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
    files = with_adapter(plan.model, config.adapters)
    tokenizer = tokenizer_of(config.tokenizer, files)
    job = job_of_export(config.settings, files, ranks, tokenizer, slots=plan.work.slots)
    spec, engine = job.spec, job.engine
    if spec.target != engine.device:
        progress.note(
            f"for {spec.target}, which this machine lacks: the graphs are verified in"
            f" {engine.name} on {engine.device}"
        )
    if spec.layout == "full" and config.use_past:
        progress.note(
            "a full graph alone, without a cache: infer.increment_model_path= writes a pair"
        )
    paths = output_paths(job, config.export_output, overwrite=config.overwrite)
    if config.in_mindformers:
        manifest = export_with_mindformers(job, paths, options_of(plan))
    else:
        manifest = export_artifact(job, paths)
    if ranks.rank > 0:
        return
    folder.write_result(
        Result.of_files(plan, files.source, began, engine=engine.name, world_size=ranks.size)
    )
    written = [(paths.folder / name).stat() for name in manifest.files]
    size = sum({(one.st_dev, one.st_ino): one.st_size for one in written}.values())
    if paths.stems is not None or ranks.size > 1:
        names = [file for graph in manifest.graphs.values() for file in graph.files]
        progress.note(f"graphs: {', '.join(str(paths.folder / name) for name in names)}")
    progress.note(
        f"wrote {paths.folder}: {spec.layout}, {size / 1e6:.0f} MB, runs in engine={engine.name}"
    )
