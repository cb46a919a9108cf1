"""run_mode=export: a model as MindIR (or .ms), proved in the engine that it is for."""

from __future__ import annotations

import time
from pathlib import Path

from lite_runner import footprint, model_files, offline, progress
from lite_runner.artifact import Place, Wanted, export_artifact, weights_and_cache
from lite_runner.backends.exported import EngineOptions
from lite_runner.config.plan import aligned, plan
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.model_files import ModelFiles
from lite_runner.report import Result, RunFolder

DEFAULT_LENGTH = 512  # positions of a layout that fixes them


def run(config: RunConfig, folder: RunFolder, ranks: Ranks | None = None) -> None:
    """Write the artifact. Raises RunnerError; nothing half-written gets the final name.

    Of several `ranks`, which have met and each call this, each writes its graphs.
    """
    ranks = ranks or Ranks()
    began = time.perf_counter()
    files = model_files.with_adapter(model_files.locate(config), config)
    tokenizer = model_files.tokenizer_of(config, files)
    want, engine = _wanted(config, files)
    if want.target != engine.device:
        progress.note(
            f"for {want.target}, which is not here: the graphs are proved in {engine.name} on "
            f"{engine.device}"
        )
    place = place_of(config, want)
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


def _wanted(config: RunConfig, files: ModelFiles) -> tuple[Wanted, EngineOptions]:
    """What the artifact has to be, and what it is proved in. Raises RunnerError."""
    length = config.infer.infer_seq_length or min(DEFAULT_LENGTH, files.model.seq_length)
    want = offline.wanted(config, files, config.predict_batch_size or 1, length)
    return want, offline.engine_for(config, want.layout)


def planned(config: RunConfig) -> list[str]:
    """The lines of dry_run=true. Raises RunnerError as `run` would."""
    files = model_files.with_adapter(model_files.planned(config), config)
    want, engine = _wanted(config, files)
    place = place_of(config, want)
    place.check()
    lines = plan(
        config,
        files.model,
        footprint.of_export(weights_and_cache(files, want)),
        device=engine.device,
        held="float32, while it is written",
        slots=want.slots,
        length=want.length,
        checkpoint=files.whereabouts(),
    )
    writes = f"{place.folder}: {want.layout}, {want.model_type}, proved in {engine.name}"
    return [*lines, *aligned({"writes": writes})]


def place_of(config: RunConfig, want: Wanted) -> Place:
    """Where the config wants the artifact."""
    overwrite = bool(config.overwrite)
    if config.infer.prefill_model_path:
        prefill = Path(config.infer.prefill_model_path).expanduser()
        increment = Path(config.infer.increment_model_path).expanduser()
        return Place.of_pair(prefill, increment, overwrite)
    given = config.export_output or f"{config.output_dir}/{config.model_name}_{want.layout}"
    return Place(Path(given).expanduser(), overwrite=overwrite)
