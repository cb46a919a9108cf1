"""Opens the exported model of a run: the one that it names, or the one in the cache, exported first
where it is not there yet."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures import network_code
from lite_runner.architectures.quantization import is_narrow
from lite_runner.backends import Backend, RunOptions
from lite_runner.backends.collectives import barrier, broadcast
from lite_runner.backends.lite.engine import EngineOptions, engine_for
from lite_runner.backends.lite.export.job import ExportJob, ExportSpec, check_length, spec_of_run
from lite_runner.backends.lite.export.output_paths import OutputPaths
from lite_runner.backends.lite.ge import in_folder
from lite_runner.backends.lite.layouts import cannot_copy, open_exported
from lite_runner.backends.mindspore.device import choose_device
from lite_runner.config.generation import GenerationConfig, more_than_greedy
from lite_runner.config.sections import AscendSettings, ExportSettings, Ranks
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.mindir.manifest import Layout, Manifest, is_pair, keeps_cache, read_manifest
from lite_runner.model import ModelFiles
from lite_runner.model.exported_model import ExportedModel
from lite_runner.system import user_cache
from lite_runner.system.environment import code_digest, versions
from lite_runner.system.files import cache_dir
from lite_runner.system.user_cache import CACHE_HINT, EXPORTS, cannot_hold
from lite_runner.weights.lora.adapter_reader import digest


def open_offline(files: ModelFiles, options: RunOptions) -> Backend:
    """The backend of the exported model that the config names, or of the one in the cache, which
    is exported first where there is none. Each of several ranks opens its own graphs. Raises
    RunnerError.
    """
    settings, ranks, slots = options.settings, options.ranks, options.slots
    assert isinstance(settings, ExportSettings)
    choose_device(options.device, AscendSettings.of(settings.context))
    if options.folder is not None:
        settings = replace(settings, infer=in_folder(settings.infer, options.folder))
    given, generations = files.exported, dict.fromkeys(options.generation)
    if given is not None:
        manifest, folder = given.manifest, given.folder
        for generation in generations:
            check_generation(manifest.layout, generation, sampled=manifest.sampled, given=True)
        check_fits(settings, given, slots, options.length, options.width)
        engine = engine_for(
            settings, manifest.layout, given.ge_files, ranks=ranks, sharing=manifest.ranks
        )
    else:
        spec = spec_of_run(settings, files, slots, options.length)
        for generation in generations:
            check_generation(spec.layout, generation, sampled=spec.sampled, given=False)
        engine = engine_for(settings, spec.layout, ranks=ranks)
        job = ExportJob(settings, files, options.tokenizer, spec, engine, ranks)
        folder, manifest = cached_export(job)
    check_ranks(settings.infer.rank_id, manifest, folder, engine, ranks)
    rank = ranks.tensor_index if ranks.size > 1 else settings.infer.rank_id % manifest.ranks
    with progress.step(f"load {folder.name} in {engine.name}", phase="read"):
        graphs = manifest.paths(folder, rank)
        return open_exported(graphs, manifest, engine, slots=slots)


def cached_export(job: ExportJob) -> tuple[Path, Manifest]:
    """Its folder in the cache and its manifest. Of several ranks each calls this; replicas of the
    model share one export. A damaged one is exported again. Raises RunnerError."""
    folder, ranks = folder_in_cache(job.settings.source.name, job.files, job.spec), job.ranks
    there = user_cache.use(folder)
    error = _error_of(folder) if there and job.first else ""
    found = there and not error
    if not found:
        job.required_tokenizer  # noqa: B018  (without one it cannot be exported)
    if broadcast(ranks, "" if found else "missing"):
        from lite_runner.backends.lite.export.writer import export_artifact

        if job.first and (reason := cannot_hold(folder.parent, 0)):
            raise EnvironmentFault(reason, CACHE_HINT)
        missing = f"no exported {job.settings.source.name} in the cache: exporting it first"
        damaged = f"{folder.name} in the cache is damaged, and exported again: {error}"
        progress.note(damaged if error else missing)
        paths = OutputPaths(folder, overwrite=bool(error))
        if ranks.tensor > 1:  # all ranks are of one replica
            manifest = export_artifact(job, paths)
            user_cache.use(folder)
            return folder, manifest
        if job.first:
            export_artifact(replace(job, ranks=Ranks()), paths)
        barrier(ranks)
        user_cache.use(folder)
    return folder, read_manifest(folder, check_files=False)  # checked above, or just written


def _error_of(folder: Path) -> str:
    """The error of an export in the cache that is damaged; empty if it is not."""
    try:
        read_manifest(folder)
    except ArtifactError as error:
        return error.message
    except OSError as error:
        return f"{folder}: cannot be read: {error.strerror or error}"
    return ""


def folder_of_run(settings: ExportSettings, files: ModelFiles, slots: int, length: int) -> Path:
    """The cache folder of the export that serves a run of `slots` rows of `length` positions.
    Raises as `spec_of`."""
    spec = spec_of_run(settings, files, slots, length)
    return folder_in_cache(settings.source.name, files, spec)


def folder_in_cache(model_name: str, files: ModelFiles, spec: ExportSpec) -> Path:
    """The cache folder of this export; its name is a hash of all that it is made
    from, whatever that is called."""
    from lite_runner.backends.native.packed_cache import content_digest

    form = asdict(spec)
    form["key"] = spec.key and hashlib.sha256(spec.key).hexdigest()
    if spec.fits_any:
        del form["slots"], form["length"]
    described = {
        "model": asdict(files.model),
        "base": files.base and asdict(files.base),
        "weights": content_digest(files.path) if files.path else files.source,
        "strategy": files.strategy and content_digest(files.strategy),
        "network": network_code(files.model),
        "seed": files.seed if files.path is None else None,
        "adapter": digest(files.adapter) if files.adapter else None,
        "form": form,
        "versions": versions(),
        "code": code_digest(),
    }
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / EXPORTS / f"{model_name}-{spec.layout}-{name}"


def check_fits(
    settings: ExportSettings, given: ExportedModel, slots: int, length: int, width: int = 1
) -> None:
    """Raises ConfigError, ArtifactError where the exported model that the user gave does not serve
    a run of `slots` rows of `length` positions, `width` of which a prompt takes. A note says which
    settings have no effect on it."""
    folder, manifest = given.folder, given.manifest
    if is_narrow(settings.kv_cache):
        raise ConfigError(
            f"{folder}: its graphs have a KV cache of float32, got kv_cache={settings.kv_cache}",
            "leave kv_cache= out",
        )
    if manifest.encrypted and not settings.infer.enc_key:
        raise ArtifactError(f"{folder}: the model is encrypted", "infer.enc_key= its key")
    if settings.infer.enc_key and not manifest.encrypted:
        raise ConfigError(f"infer.enc_key: the model in {folder} is not encrypted")
    if not settings.use_past and keeps_cache(manifest.layout):
        raise ConfigError(
            f"{folder}: exported with a cache, got model.model_config.use_past=false",
            "model.model_config.use_past=true",
        )
    asked = settings.infer.infer_seq_length or manifest.seq_length
    if max(length, asked) > manifest.seq_length:
        raise ConfigError(
            f"{folder}: made for {manifest.seq_length} positions per row, but "
            + (
                f"the longest prompt and its new tokens need {length}"
                if length > manifest.seq_length
                else f"infer.infer_seq_length={asked} is asked for"
            ),
            "ask for fewer new tokens, or export with a larger infer.infer_seq_length",
        )
    check_length(length, asked)
    if not manifest.fits_any and slots > manifest.batch_size:
        prompts = manifest.batch_size // width
        raise ConfigError(
            f"{folder}: exported for a batch size of {manifest.batch_size}, got {slots} rows",
            f"{settings.batch_key}={prompts}"
            if prompts
            else f"export the model again with predict_batch_size={width}",
        )
    export = settings.export
    decided = {  # by the export
        f"export.layout={export.layout}": export.chosen_layout not in (None, manifest.layout),
        "export.weight_fp16=true": export.weight_fp16 and manifest.precision != "float16",
    }
    for setting in (setting for setting, differs in decided.items() if differs):
        progress.note(
            f"{setting} has no effect on {folder}: exported as {manifest.layout} in"
            f" {manifest.precision}"
        )


def check_ranks(
    rank_id: int, manifest: Manifest, folder: Path, engine: EngineOptions, ranks: Ranks
) -> None:
    """Raises ConfigError where there are no graphs for each of the ranks. Started by hand, which is
    for Ascend, each process knows its own rank alone, `rank_id`."""
    by_hand = ranks.size == 1 and engine.device == "Ascend"
    if manifest.ranks != ranks.tensor and not by_hand:
        raise ConfigError(
            f"{folder}: exported for {manifest.ranks} ranks that share the model, got"
            f" model_parallel={ranks.tensor}",
            f"parallel_config.model_parallel={manifest.ranks}, or export it again with"
            f" parallel_config.model_parallel={ranks.tensor}",
        )
    if rank_id and engine.device != "Ascend":
        raise ConfigError(
            f"infer.rank_id={rank_id}: a process that was started by hand is one of"
            " several ranks only on Ascend",
            "parallel=tp2 (or another) starts all ranks",
        )


def check_generation(
    layout: Layout, generation: GenerationConfig, *, sampled: bool, given: bool
) -> None:
    """Raises ConfigError for options that graphs of this layout cannot generate with: `sampled`
    ones, or `given` ones, which the run names."""
    copies = max(generation.num_beams, generation.num_return_sequences) > 1
    if copies and is_pair(layout):
        raise ConfigError(*cannot_copy(layout, given=given))
    if sampled and (asked := more_than_greedy(generation)):
        raise ConfigError(
            "the exported model chooses the likeliest token itself (is_sample_acceleration),"
            f" which rules out {', '.join(asked.values())}",
            "export it without model.model_config.is_sample_acceleration",
        )
