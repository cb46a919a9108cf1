"""GE options of a run on Ascend: the config's, the model folder's, or the processor's preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config.ge import FILE_NAME, GeConfig, ge_config, preset_of
from lite_runner.config.groups import compose_groups
from lite_runner.config.options import ExportedOptions
from lite_runner.system import environment


def ge_of_run(config: ExportedOptions, beside: tuple[Path, ...] = ()) -> GeConfig | None:
    """The options for this machine's Ascend processor; `beside`: config.ini files of the model's
    folder. None with ge=none, and for a processor without a preset.

    Raises EnvironmentFault if the processor cannot be identified.
    """
    given, infer = ge_config(config), config.infer
    if infer.ge_config_path or infer.ge_preset is None:
        return given
    if infer.ge_options is None and beside:
        return GeConfig(files=beside)
    preset = preset_of(environment.ascend_soc())
    if preset is None:
        return given
    options = compose_groups({"ge": preset})["infer"]["ge_options"]
    laid = dataclasses.replace(infer, ge_options=_merged(options, infer.ge_options or {}))
    return ge_config(dataclasses.replace(config, infer=laid))


def tell_ge(config: ExportedOptions, ge: GeConfig | None) -> None:
    """Note the source of the GE options, and which ones are left to Lite's defaults."""
    if ge is not None and config.infer.ge_preset == "auto" and not config.infer.ge_config_path:
        soc = environment.ascend_soc()
        files = ", ".join(map(str, ge.files))
        progress.note(f"GE options: {files or f'ge={preset_of(soc)}, for {soc}'}")
    for text in (ge or GeConfig()).unset():
        progress.note(f"GE options: {text}")


def ge_to_write(config: ExportedOptions, target: str) -> GeConfig | None:
    """The options to write with exported graphs: this machine's if the target is Ascend."""
    if target != "Ascend" or not environment.ascend_devices():
        if target == "Ascend" and config.infer.ge_preset == "auto":
            progress.note(
                f"no {FILE_NAME} is written: a run takes the GE options of its own processor;"
                " ge=atlas_800 or ge=atlas_800t_a2 writes them down for MindFormers' tools"
            )
        return ge_config(config)
    return ge_of_run(config)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Deep-merge `above` over `below`."""
    laid = dict(below)
    for name, value in above.items():
        under = laid.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        laid[name] = _merged(under or {}, value) if both else value
    return laid
