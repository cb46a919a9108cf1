"""run_mode=export: a model as MindIR (or .ms), proved in the engine that it is for."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from lite_runner import progress
from lite_runner.backends.exported import Device, EngineOptions
from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.cluster import ranks_of
from lite_runner.config.compose import raise_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.ge import ge_faults
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import (
    AdapterOptions,
    ExportedOptions,
    OverwriteOptions,
)
from lite_runner.config.parallel import DATA_KEYS, division_faults
from lite_runner.export import offline
from lite_runner.export.writer import ExportSpec, Place, export_artifact, weights_and_cache
from lite_runner.model import model_files
from lite_runner.model.model_files import ModelFiles
from lite_runner.output.report import Result, RunFolder
from lite_runner.plan.describe import described
from lite_runner.plan.plan import Plan
from lite_runner.plan.session import Job
from lite_runner.sizing.need import export_need
from lite_runner.weights.lora.adapter import digest

DEFAULT_LENGTH = 512  # positions of a layout that fixes them


@dataclass(frozen=True, kw_only=True)
class Config(ExportedOptions, AdapterOptions, OverwriteOptions):
    """run_mode=export"""

    writes_graphs: ClassVar[bool] = True

    export_output: str  # "": named in output_dir


def faults(config: Config) -> Iterator[Fault]:
    """What does not go together in an export."""
    infer = config.infer
    if infer.model_dir:
        yield fault("infer.model_dir", "infer.model_dir is read; give export_output=FOLDER")
    if config.export_output and (infer.prefill_model_path or infer.increment_model_path):
        yield fault(
            ("export_output", "infer.prefill_model_path", "infer.increment_model_path"),
            "export_output and infer.prefill_model_path both say where to write; give one of them",
        )
    if config.use_parallel and (copies := config.parallel_config.data_parallel) > 1:
        yield fault(
            (*DATA_KEYS, "run_mode"),
            f"parallel_config.data_parallel: got {copies}, expected 1 with run_mode=export: all"
            " copies of a model run the same graphs",
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
    want, engine = wanted(config, files)
    place = place_of(config, files, want, engine.device)
    place.check()
    job = Job((), (), GenerationConfig(), want.slots, want.length)
    writes = f"{place.folder}: {want.layout}, {want.model_type}, proved in {engine.name}"
    planned = Plan(
        config=config,
        device=engine.device,
        backend=config.backend,
        dtype="float32, while it is written",
        ranks=ranks,
        files=files,
        job=job,
        memory=export_need(weights_and_cache(files, want)),
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
    want, engine = wanted(config, files)
    if want.target != engine.device:
        progress.note(
            f"for {want.target}, which is not here: the graphs are proved in {engine.name} on "
            f"{engine.device}"
        )
    place = place_of(config, files, want, engine.device)
    manifest = export_artifact(place, config, files, tokenizer, want, engine, ranks)
    if ranks.rank > 0:
        return
    folder.write_result(
        Result.of_files(config, files.source, began, engine=engine.name, world_size=ranks.size)
    )
    size = sum((place.folder / name).stat().st_size for name in manifest.files)
    if place.stems is not None or ranks.size > 1:
        names = [file for graph in manifest.graphs.values() for file in graph.files]
        progress.note(f"graphs: {', '.join(str(place.folder / name) for name in names)}")
    progress.note(
        f"wrote {place.folder}: {want.layout}, {size / 1e6:.0f} MB, runs in engine={engine.name}"
    )


def wanted(config: Config, files: ModelFiles) -> tuple[ExportSpec, EngineOptions]:
    """What the artifact has to be, and what it is proved in. Raises RunnerError."""
    length = config.infer.infer_seq_length or default_length(files)
    want = offline.wanted(config, files, config.predict_batch_size or 1, length)
    return want, offline.engine_for(config, want.layout)


def place_of(config: Config, files: ModelFiles, want: ExportSpec, device: Device) -> Place:
    """Where the config wants the artifact."""
    overwrite = config.overwrite
    if config.infer.prefill_model_path:
        prefill = Path(config.infer.prefill_model_path).expanduser()
        increment = Path(config.infer.increment_model_path).expanduser()
        return Place.of_pair(prefill, increment, overwrite)
    given = config.export_output
    if not given:
        parts = [config.model_name, want.layout, *_particulars(config, files, want, device)]
        given = f"{config.output_dir}/{'_'.join(parts)}"
    return Place(Path(given).expanduser(), overwrite=overwrite)


def _particulars(
    config: Config, files: ModelFiles, want: ExportSpec, device: Device
) -> Iterator[str]:
    """What tells an export from the one without settings on this `device`: each is part of the
    folder's name, so that exports that differ do not meet in one folder."""
    if want.target != device:
        yield want.target.lower()
    if want.model_type == "mindir_lite":
        yield "lite"
    if want.operators is not None:
        yield str(files.quantization).replace(" quant_group=", "-g")
        if want.operators.kv_cache != "fp32":
            yield f"kv-{want.operators.kv_cache}"
    weights = want.precision if want.rounded == "float32" else want.rounded
    if weights != ("float16" if want.target == "Ascend" else "float32"):
        yield weights
    if want.sampled:
        yield "sampled"
    if want.key is not None:
        yield "encrypted"
    if want.ranks > 1:
        yield f"tp{want.ranks}"
    if want.layout != "resizable":  # its graph takes any number of rows and positions
        if want.slots > 1:
            yield f"b{want.slots}"
        if want.length != default_length(files):
            yield f"s{want.length}"
    if files.adapter is not None:
        # The name is the user's folder or from a file; two adapters may have the same.
        name = re.sub(r"[^\w.-]", "-", files.adapter.name)[:40]
        yield f"{name}-{digest(files.adapter)[:8]}"


def default_length(files: ModelFiles) -> int:
    """Positions of a row, where the config says nothing."""
    return min(DEFAULT_LENGTH, files.model.seq_length)
