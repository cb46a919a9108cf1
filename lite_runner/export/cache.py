"""Exported models in the cache: where each is, and whether backend=auto finds one there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from lite_runner import progress
from lite_runner.architectures import network_code
from lite_runner.config.cluster import ranks_of
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.options import ExportedOptions
from lite_runner.export.spec import ExportSpec, spec_of_run
from lite_runner.model.files import ModelFiles
from lite_runner.system.code_digest import code_digest
from lite_runner.system.user_cache import cache_dir
from lite_runner.system.versions import versions
from lite_runner.weights.lora.adapter_file import digest
from lite_runner.weights.source import EXPORTS


def chosen_backend(
    config: ExportedOptions,
    files: ModelFiles,
    generation: GenerationConfig,
    *,
    slots: int,
    length: int,
) -> Literal["ms", "mslite"]:
    """What backend=auto means: mslite where an exported model is there for this run."""
    if files.exported is not None:
        return "mslite"
    if min(ranks_of(config).data, ranks_of(config).tensor) > 1:
        return "ms"
    spec = spec_of_run(config, files, slots, length)
    copies = max(generation.num_beams, generation.num_return_sequences) > 1
    found = folder_in_cache(config, files, spec)
    if found.is_dir() and not (copies and not spec.fits_any):
        progress.note(f"backend=auto: mslite, since {found.name} is in the cache")
        return "mslite"
    progress.note(f"backend=auto: ms, since no exported {config.model_name} is in the cache")
    return "ms"


def _state(path: Path) -> str:
    """Size and time of a checkpoint's file, or of every file in its folder."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file.relative_to(path)), file.stat()) for file in files if file.is_file()]
    return " ".join(f"{name} {one.st_size} {one.st_mtime_ns}" for name, one in states)


def folder_of_run(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> Path:
    """The cache folder of the export that serves a run of `slots` rows of `length` positions.
    Raises as `spec_of`."""
    return folder_in_cache(config, files, spec_of_run(config, files, slots, length))


def folder_in_cache(config: ExportedOptions, files: ModelFiles, spec: ExportSpec) -> Path:
    """The cache folder of this export; its name is a hash of all that it is made from."""
    origin = files.source
    if files.path is not None:
        origin = f"{files.path.resolve()} {_state(files.path)}"
    form = asdict(spec)
    form["key"] = spec.key and hashlib.sha256(spec.key).hexdigest()
    if spec.fits_any:
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
    return cache_dir() / EXPORTS / f"{config.model_name}-{spec.layout}-{name}"
