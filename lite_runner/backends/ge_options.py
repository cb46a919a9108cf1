"""Which GE options a run has on Ascend: its own, those beside the model, or its processor's."""

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
    """The options on this machine, which has an Ascend processor; `beside`: the config.ini in the
    model's folder. None with ge=none, and for a processor that has no preset.

    Raises EnvironmentFault where the processor cannot be told.
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
    laid = dataclasses.replace(infer, ge_options=_laid(options, infer.ge_options or {}))
    return ge_config(dataclasses.replace(config, infer=laid))


def tell_ge(config: ExportedOptions, ge: GeConfig | None) -> None:
    """Note where the options of a run on Ascend come from, and what they leave to Lite."""
    if ge is not None and config.infer.ge_preset == "auto" and not config.infer.ge_config_path:
        soc = environment.ascend_soc()
        files = ", ".join(map(str, ge.files))
        progress.note(f"GE options: {files or f'ge={preset_of(soc)}, for {soc}'}")
    for text in (ge or GeConfig()).unset():
        progress.note(f"GE options: {text}")


def ge_to_write(config: ExportedOptions, target: str) -> GeConfig | None:
    """The options that go beside exported graphs: those of this machine, if they are for it."""
    if target != "Ascend" or not environment.ascend_devices():
        if target == "Ascend" and config.infer.ge_preset == "auto":
            progress.note(
                f"no {FILE_NAME} is written: a run takes the GE options of its own processor;"
                " ge=atlas_800 or ge=atlas_800t_a2 writes them down for MindFormers' tools"
            )
        return ge_config(config)
    return ge_of_run(config)


def _laid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One section over the other, name by name."""
    laid = dict(below)
    for name, value in above.items():
        under = laid.get(name)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        laid[name] = _laid(under or {}, value) if both else value
    return laid
