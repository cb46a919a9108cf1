"""Adapters written for PEFT or MindFormers, bit-identical."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.release import Release
from lite_runner.config.sections import AdapterFormat
from lite_runner.system.files import atomic_write, make_folder
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_config import NAMES
from lite_runner.weights.lora.adapter_content import content
from lite_runner.weights.lora.adapter_file import MINDFORMERS_FILE, PEFT_FILE
from lite_runner.weights.lora.adapter_listing import LISTING
from lite_runner.weights.write import check_folder, replaced_folder

# What another conversion left in a folder and would be read in place of what is written.
_OURS = {PEFT_FILE, MINDFORMERS_FILE, LISTING, *NAMES}


def write_adapters(
    adapters: Mapping[str, Adapter],
    model: Decoder,
    target: Path,
    format: AdapterFormat,
    *,
    overwrite: bool = False,
    listed: bool,
    release: Release = Release(),  # noqa: B008  (frozen)
) -> None:
    """Write adapters of `model`: where `listed`, to folders in `target` beside a lora_adapter.json
    that names them, else the only one to `target` itself. In MindFormers' format the parameters
    have the names of its `release`, or each of the two that there are.

    Raises ConfigError for a folder that is not empty (without `overwrite`), ArtifactError where the
    format cannot hold an adapter, EnvironmentFault where nothing can be written.
    """
    folders = {name: target / name if listed else target for name in adapters}
    check_folder(target, overwrite)
    names = release.adapter_names if format == "mindformers" else ()
    contents = {name: content(adapter, model, names) for name, adapter in adapters.items()}
    for name, (tensors, settings) in contents.items():
        with replaced_folder(folders[name], _OURS) as folder:
            if format == "peft":
                write_safetensors(folder / PEFT_FILE, tensors, {"format": "pt"})
            else:
                write_ckpt(folder / MINDFORMERS_FILE, tensors)
            _write_json(folder / NAMES[0], settings)
    if listed:
        make_folder(target)
        _write_json(target / LISTING, {name: name for name in adapters})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
