"""The offline backend of a run: which artifact it means, made first where there is none."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import lite_runner
from lite_runner import progress
from lite_runner.artifact import ENGINE_OF, Wanted, export_artifact, open_artifact
from lite_runner.backends.base import Backend
from lite_runner.backends.engines.lite_python import find_lite_python
from lite_runner.backends.sizes import cache_length
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError, EnvironmentFault
from lite_runner.export.manifest import Layout, Manifest, read_manifest
from lite_runner.model_files import ModelFiles
from lite_runner.report import versions
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.files import sha256_of
from lite_runner.weights.source import cache_dir

PACKAGE = Path(lite_runner.__file__).parent


def open_offline(
    config: RunConfig, files: ModelFiles, tokenizer: Tokenizer, *, slots: int, length: int
) -> Backend:
    """The backend of the artifact that the config names, or of the one in the cache, which is
    exported first where there is none. Raises RunnerError."""
    if config.infer.model_dir:
        folder = Path(config.infer.model_dir).expanduser()
        manifest = read_manifest(folder)
        _check_fits(config, files, manifest, folder, slots, length)
    else:
        # Rounded up, so that prompts of other lengths find an artifact again.
        length = config.infer.infer_seq_length or cache_length(length, files.model.seq_length)
        want = wanted(config, 1 << (slots - 1).bit_length(), length)
        folder = folder_in_cache(files, config, want)
        if folder.is_dir():
            manifest = read_manifest(folder, check_files=False)  # ours; checked when written
        else:
            progress.note(f"no exported {config.model_name} in the cache: exporting it first")
            manifest = export_artifact(folder, config, files, tokenizer, want)
    with progress.step(f"load {folder.name}"):
        return open_artifact(folder, manifest, slots=slots, threads=config.context.threads)


def wanted(config: RunConfig, slots: int, length: int) -> Wanted:
    """The engine and form that a config asks for, or the first that this machine has.

    Raises EnvironmentFault where an engine was asked for that is not here.
    """
    layout = _layout(config)
    model_type = config.infer.model_type
    if model_type is None:
        # A .ms loads in a fraction of a MindIR's time; who exports wants what others can read.
        to_run = config.run_mode != "export" or config.export.weight_fp16
        model_type = "mindir_lite" if layout == "resizable" and to_run else "mindir"
    if config.export.weight_fp16 and model_type != "mindir_lite":
        raise ConfigError("export.weight_fp16=true needs infer.model_type=mindir_lite")
    return Wanted(layout, model_type, config.export.weight_fp16, slots, length)


def _layout(config: RunConfig) -> Layout:
    layout = config.export.layout
    if layout == "dynamic" or layout == "static_pair":
        return layout
    if config.engine == "graph-cell":
        return "dynamic"
    try:
        find_lite_python()
    except EnvironmentFault as fault:
        asked = {config.engine, layout, config.infer.model_type}
        if asked & {"lite-worker", "resizable", "mindir_lite"}:
            raise
        progress.note(f"engine=auto: graph-cell, since {fault.message}")
        return "dynamic"
    return "resizable"


def folder_in_cache(files: ModelFiles, config: RunConfig, want: Wanted) -> Path:
    """Where the artifact of this model and form is kept; named by all that it is made from."""
    origin = files.source
    if files.path is not None:
        status = files.path.stat()
        origin = f"{files.path.resolve()} {status.st_size} {status.st_mtime_ns}"
    form = asdict(want)
    if want.layout == "resizable":  # its graph takes any number of slots and positions
        del form["slots"], form["length"]
    described = {
        "model": asdict(files.model),
        "origin": origin,
        "seed": files.seed if files.path is None else None,
        "form": form,
        "versions": versions(),
        "code": sha256_of(*sorted([*PACKAGE.glob("export/*.py"), *PACKAGE.glob("models/*.py")])),
    }
    name = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "artifacts" / f"{config.model_name}-{want.layout}-{name}"


def _check_fits(
    config: RunConfig, files: ModelFiles, manifest: Manifest, folder: Path, slots: int, length: int
) -> None:
    """The artifact that the user gave against what is asked of it."""
    if manifest.model != files.model:
        raise ArtifactError(
            f"{folder}: an export of {manifest.model_name}, another model than {config.model_name}",
            f"model={manifest.model_name}",
        )
    if config.engine not in ("auto", ENGINE_OF[manifest.layout]):
        raise ConfigError(
            f"engine={config.engine} does not run the layout {manifest.layout} of {folder}",
            f"engine={ENGINE_OF[manifest.layout]}",
        )
    if length > manifest.seq_length:
        raise ConfigError(
            f"{folder}: made for {manifest.seq_length} positions a row, but the longest prompt and "
            f"its new tokens need {length}",
            "ask for fewer new tokens, or export with a larger infer.infer_seq_length",
        )
    if manifest.layout != "resizable" and slots > manifest.batch_size:
        raise ConfigError(
            f"{folder}: made for {manifest.batch_size} rows at a time, {slots} are asked for",
            f"predict_batch_size={manifest.batch_size}",
        )
