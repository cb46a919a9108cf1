"""The offline backend of a run: which exported model it means, made first where there is none."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, cast

from lite_runner import progress
from lite_runner.architectures import network_code
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Backend
from lite_runner.backends.dynamic import cannot_copy
from lite_runner.backends.exported import (
    Device,
    EngineOptions,
    check_operators,
    choose_engine,
    open_exported,
    why_unavailable,
)
from lite_runner.backends.ge_options import ge_of_run, tell_ge
from lite_runner.backends.step_sizes import cache_length, step_capacity
from lite_runner.config.cluster import ranks_of
from lite_runner.config.engines import ENGINES
from lite_runner.config.ge import GeConfig, ge_config, serves
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions
from lite_runner.config.ranks import Ranks
from lite_runner.config.sampling_checks import more_than_greedy
from lite_runner.config.secret import encryption_key
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.export.writer import ExportSpec, Place, export_artifact, said_by_first
from lite_runner.mindir import resizable_inputs
from lite_runner.mindir.manifest import Layout, Manifest, Operators, read_manifest
from lite_runner.model.model_files import ModelFiles
from lite_runner.native import packed_model
from lite_runner.native.packing import FORMAT
from lite_runner.system import environment
from lite_runner.system.code_digest import code_digest
from lite_runner.system.versions import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.lora.adapter import digest
from lite_runner.weights.source import EXPORTS, cache_dir


def open_offline(
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    each: Sequence[GenerationConfig],
    *,
    slots: int,
    length: int,
    ranks: Ranks,
) -> Backend:
    """The backend of the exported model that the config names, or of the one in the cache, which
    is exported first where there is none; for prompts with the options `each`. Of several `ranks`
    each has its own. Raises RunnerError.
    """
    given = files.given
    if given is not None:
        manifest, folder = given.manifest, given.folder
        _check_fits(config, files, manifest, slots, length)
        engine = engine_for(config, manifest.layout, given.ge_files, ranks=ranks)
    else:
        want = wanted_of_run(config, files, slots, length)
        engine = engine_for(config, want.layout, ranks=ranks)
        folder = folder_in_cache(files, config, want)
        if tokenizer is None and not folder.is_dir():
            raise ConfigError(
                "an exported model has its tokenizer beside it, and there is none",
                "processor.tokenizer.tokenizer_file= names one",
            )
        manifest = _in_cache(folder, config, files, tokenizer, want, engine, ranks)
    _check_ranks(config, manifest, folder, engine, ranks)
    rank = ranks.tensor_index if ranks.size > 1 else config.infer.rank_id % manifest.ranks
    graphs, name = manifest.paths(folder, rank), folder.name
    for generation in dict.fromkeys(each):
        _check_generation(manifest, generation)
    with progress.step(f"load {name} in {engine.name}"):
        return open_exported(graphs, manifest, engine, slots=slots)


def _in_cache(
    folder: Path,
    config: ExportedOptions,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    want: ExportSpec,
    engine: EngineOptions,
    ranks: Ranks,
) -> Manifest:
    """What is in the cache, exported now where there is nothing; copies of a model share it."""
    missing = said_by_first(ranks, "" if folder.is_dir() else "missing")
    if missing and tokenizer is not None:
        progress.note(f"no exported {config.model_name} in the cache: exporting it first")
        place = Place(folder)
        if ranks.tensor > 1:  # of which there is one copy
            return export_artifact(place, config, files, tokenizer, want, engine, ranks)
        if ranks.rank == 0:
            export_artifact(place, config, files, tokenizer, want, engine)
        said_by_first(ranks, "exported")
    return read_manifest(folder, check_files=False)  # ours; checked when written


def chosen_backend(
    config: ExportedOptions,
    files: ModelFiles,
    generation: GenerationConfig,
    *,
    slots: int,
    length: int,
) -> Literal["ms", "mslite"]:
    """What backend=auto means: mslite where an exported model is there for this run."""
    if files.given is not None:
        return "mslite"
    if min(ranks_of(config).data, ranks_of(config).tensor) > 1:
        return "ms"
    want = wanted_of_run(config, files, slots, length)
    copies = max(generation.num_beams, generation.num_return_sequences) > 1
    found = folder_in_cache(files, config, want)
    if found.is_dir() and not (copies and want.layout != "resizable"):
        progress.note(f"backend=auto: mslite, since {found.name} is in the cache")
        return "mslite"
    progress.note(f"backend=auto: ms, since no exported {config.model_name} is in the cache")
    return "ms"


def engine_for(
    config: ExportedOptions,
    layout: Layout,
    ge_files: tuple[Path, ...] = (),
    *,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
) -> EngineOptions:
    """The engine of a run; `ge_files`: the config.ini beside the model, unless the run has its own.

    Raises ConfigError, EnvironmentFault where the one that is asked for cannot run the layout.
    """
    device = cast(
        Device, environment.resolve_device(config.context.device_target, planned=config.dry_run)
    )
    name = choose_engine(layout, config.engine, device)
    ge = None
    if serves(name, device):
        ge = ge_of_run(config, ge_files)
        tell_ge(config, ge)
    elif config.run_mode != "export":  # which only writes them down
        given = ge_config(config) or (GeConfig(files=ge_files) if ge_files else None)
        if given is not None:
            options = ", ".join(map(str, given.files)) or "ge="
            progress.note(f"{options}: for GE on Ascend; this runs in {name} on {device}")
    return EngineOptions(
        name=name,
        device=device,
        device_id=config.context.device_id,
        rank_id=ranks.rank or config.infer.rank_id,
        threads=config.context.threads,
        ge=ge,
        key=encryption_key(config.infer.enc_key),
    )


def wanted(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """What an export has to be, as the config asks or as the first engine here wants it.

    Raises EnvironmentFault where an engine was asked for that is not here, or our own operators
    are not, which quantized weights need.
    """
    if files.quantization.quant != "none":
        return _wanted_of_operators(config, files, slots, length)
    key = encryption_key(config.infer.enc_key)
    device = cast(
        Device, environment.resolve_device(config.context.device_target, planned=config.dry_run)
    )
    target = device if config.export.target == "auto" else config.export.target
    layout = _layout(config, files.model, target)
    model_type = config.infer.model_type
    if model_type is None:
        # A .ms loads in a fraction of a MindIR's time; who exports wants what others can read.
        to_run = config.run_mode != "export" or config.export.weight_fp16
        model_type = "mindir_lite" if layout == "resizable" and to_run else "mindir"
    dtype, rounded = config.compute_dtype(target), config.rounded_dtype(target)
    faults = []
    if config.export.weight_fp16 and model_type != "mindir_lite":
        faults.append("export.weight_fp16=true needs infer.model_type=mindir_lite")
    if layout == "resizable" and dtype != "float32":
        faults.append(f"export.layout=resizable computes in float32; got {dtype}")
    if layout == "resizable":
        faults += [
            f"export.layout=resizable: {why}; take export.layout=dynamic or static_pair"
            for why in resizable_inputs.unsupported(files.model)
        ]
    if dtype == "bfloat16":
        faults.append("an export in bfloat16 cannot be proved on a CPU; float16 or float32 can")
    if config.kv_cache != "fp32":
        faults.append(f"kv_cache={config.kv_cache} of an export needs quantized weights: quant=")
    ranks = ranks_of(config).tensor
    if ranks > 1 and key is not None and target != device:
        faults.append("infer.enc_key of graphs that ranks share needs the device they are for")
    if layout == "resizable" and key is not None:
        faults.append("infer.enc_key needs export.layout=dynamic or static_pair")
    if faults:
        raise ConfigError.of(faults)
    sampled = config.model.model_config.is_sample_acceleration
    return ExportSpec(
        layout,
        model_type,
        config.export.weight_fp16,
        dtype,
        target,
        sampled,
        slots,
        length,
        rounded=rounded,
        key=key,
        ranks=ranks,
        vocab_parallel=config.vocab_parallel,
    )


def _wanted_of_operators(
    config: ExportedOptions, files: ModelFiles, slots: int, length: int
) -> ExportSpec:
    """Of quantized weights; the config's checks saw to what else it asks for."""
    device = cast(
        Device, environment.resolve_device(config.context.device_target, planned=config.dry_run)
    )
    held, dtype = files.quantization, config.compute_dtype(device)
    faults = []
    if dtype != "float32":
        faults.append(f"an export of quant={held} computes in float32; got {dtype}")
    faults += [
        f"quant={held} is not available in an export: {why}"
        for why in packed_model.unsupported(files.model)
    ]
    if ranks_of(config).tensor > 1:
        faults.append(f"an export of quant={held} is of one rank: model_parallel=1")
    if not config.context.kernels:
        faults.append(f"an export of quant={held} needs context.kernels=true")
    if faults:
        raise ConfigError.of(faults)
    check_operators(f"an export of quant={held}", device)
    capacity = step_capacity(slots)
    # The newest format: the export says which its layers have.
    operators = Operators(FORMAT, held.quant, held.group, config.kv_cache, capacity)
    rounded = config.rounded_dtype(device)
    return ExportSpec(
        "dynamic", "mindir", False, dtype, "CPU", False, slots, length, operators, rounded
    )


def wanted_of_run(
    config: ExportedOptions, files: ModelFiles, slots: int, length: int
) -> ExportSpec:
    """The export that serves a run of `slots` rows of `length` positions. Raises as `wanted`."""
    asked = config.infer.infer_seq_length
    _check_length(length, asked)
    # Rounded up, so that prompts of other lengths find an artifact again.
    length = asked or cache_length(length, files.model.seq_length)
    return wanted(config, files, 1 << (slots - 1).bit_length(), length)


def _check_length(length: int, asked: int | None) -> None:
    if asked is not None and length > asked:
        raise ConfigError(
            f"infer.infer_seq_length={asked}: the longest prompt and its new tokens need {length}",
            "ask for fewer new tokens, or a larger infer.infer_seq_length",
        )


def _layout(config: ExportedOptions, model: Decoder, target: Device) -> Layout:
    if config.export.layout != "auto":
        return config.export.layout
    if (
        target == "Ascend"
        or config.model.model_config.is_sample_acceleration
        or config.infer.prefill_model_path
        or ranks_of(config).tensor > 1
    ):
        return "static_pair"
    if config.engine == "graph-cell" or config.infer.enc_key:
        return "dynamic"
    named = config.engine != "auto" or config.infer.model_type == "mindir_lite"
    if resizable_inputs.unsupported(model) and not named:
        return "dynamic"
    faults = [why_unavailable(engine, "resizable", target) for engine in ENGINES["resizable"]]
    if named or None in faults:
        return "resizable"
    assert isinstance(faults[-1], EnvironmentFault)
    progress.note(f"engine=auto: graph-cell, since {faults[-1].message}")
    return "dynamic"


def _state(path: Path) -> str:
    """Of a checkpoint's file, or of every file in its folder, what changes with its contents."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file.relative_to(path)), file.stat()) for file in files if file.is_file()]
    return " ".join(f"{name} {one.st_size} {one.st_mtime_ns}" for name, one in states)


def folder_in_cache(files: ModelFiles, config: ExportedOptions, want: ExportSpec) -> Path:
    """Where the artifact of this model and form is kept; named by all that it is made from."""
    origin = files.source
    if files.path is not None:
        origin = f"{files.path.resolve()} {_state(files.path)}"
    form = asdict(want)
    form["key"] = want.key and hashlib.sha256(want.key).hexdigest()
    if want.layout == "resizable":  # its graph takes any number of slots and positions
        del form["slots"], form["length"]
    described = {
        "model": asdict(files.model),
        "origin": origin,
        "network": network_code(files.model),
        "seed": files.seed if files.path is None else None,
        "adapter": digest(files.adapter) if files.adapter else None,
        "form": form,
        "versions": versions(),
        "code": code_digest(),
    }
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / EXPORTS / f"{config.model_name}-{want.layout}-{name}"


def _check_fits(
    config: ExportedOptions, files: ModelFiles, manifest: Manifest, slots: int, length: int
) -> None:
    """The exported model that the user gave against what is asked of it."""
    assert files.given is not None
    folder = files.given.folder
    cache = manifest.operators.kv_cache if manifest.operators else "fp32"
    if manifest.operators and not config.context.kernels:
        raise ConfigError(
            f"{folder}: a graph of this project's own operators, and context.kernels=false",
            "leave context.kernels= out, or export it without quant=",
        )
    if config.kv_cache not in ("fp32", cache):
        raise ConfigError(
            f"{folder}: exported with kv_cache={cache}, got kv_cache={config.kv_cache}",
            "leave kv_cache= out, or export it again",
        )
    if manifest.encrypted and not config.infer.enc_key:
        raise ArtifactError(f"{folder}: the model is encrypted", "infer.enc_key= its key")
    if config.infer.enc_key and not manifest.encrypted:
        raise ConfigError(f"infer.enc_key: the model in {folder} is not encrypted")
    asked = config.infer.infer_seq_length or manifest.seq_length
    if max(length, asked) > manifest.seq_length:
        raise ConfigError(
            f"{folder}: made for {manifest.seq_length} positions a row, but "
            + (
                f"the longest prompt and its new tokens need {length}"
                if length > manifest.seq_length
                else f"infer.infer_seq_length={asked} is asked for"
            ),
            "ask for fewer new tokens, or export with a larger infer.infer_seq_length",
        )
    _check_length(length, asked)
    if manifest.layout != "resizable" and slots > manifest.batch_size:
        raise ConfigError(
            f"{folder}: made for {manifest.batch_size} rows at a time, {slots} are asked for",
            f"predict_batch_size={manifest.batch_size}",
        )


def _check_ranks(
    config: ExportedOptions,
    manifest: Manifest,
    folder: Path,
    engine: EngineOptions,
    ranks: Ranks,
) -> None:
    """Whether there are graphs for each of the ranks. Started by hand, which is for Ascend, each
    process knows its own alone."""
    by_hand = ranks.size == 1 and engine.device == "Ascend"
    if manifest.ranks != ranks.tensor and not by_hand:
        raise ConfigError(
            f"{folder}: exported for {manifest.ranks} ranks that share the model, got"
            f" model_parallel={ranks.tensor}",
            f"parallel_config.model_parallel={manifest.ranks}, or export it again with"
            f" model_parallel={ranks.tensor}",
        )
    if config.infer.rank_id and engine.device != "Ascend":
        raise ConfigError(
            f"infer.rank_id={config.infer.rank_id}: a process that was started by hand is one of"
            " several ranks only on Ascend",
            "parallel=tp2 (or another) starts all ranks",
        )


def _check_generation(manifest: Manifest, generation: GenerationConfig) -> None:
    """What a graph cannot do, before it is loaded."""
    copies = max(generation.num_beams, generation.num_return_sequences) > 1
    if copies and manifest.layout != "resizable":
        raise ConfigError(*cannot_copy(manifest.layout))
    if manifest.sampled and (asked := more_than_greedy(generation)):
        raise ConfigError(
            f"the exported model chooses the likeliest token itself (is_sample_acceleration), so "
            f"{', '.join(asked.values())} cannot be done",
            "export it without model.model_config.is_sample_acceleration",
        )
