"""Merging a user's yaml over the groups: of MindFormers, of our keys, or of an earlier run."""

from __future__ import annotations

import copy
import types
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from lite_runner.config.argv import CommandLine
from lite_runner.config.ascend import KEYS
from lite_runner.config.choices import blended
from lite_runner.config.composed import Composed
from lite_runner.config.config_file import ConfigFile
from lite_runner.config.fields import Note, accepts, leaves, show
from lite_runner.config.groups import GROUPS, files_of, options_of
from lite_runner.config.mindformers import arch_of, format_keys, translate
from lite_runner.config.mindformers_keys import IGNORED, is_only_mindformers
from lite_runner.config.repeat import is_of_a_run, run_again
from lite_runner.config.yaml_file import at, put

# Keys that only exported models have.
OFFLINE_ONLY = ("infer.", "model.model_config.is_sample_acceleration")
ASCEND_ONLY = tuple(f"context.{key}" for key in KEYS)
# Where run_mode=export of run_mindformer writes the graphs.
MINDFORMERS_EXPORT = {
    "prefill_model_path": "mindir_full_checkpoint",
    "increment_model_path": "mindir_inc_checkpoint",
}


def overlay_file(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Merge a yaml of MindFormers or of an earlier run; errors are collected."""
    if any("model" in fault.keys for fault in composed.faults):
        return
    if other := _other_model(composed, line, file):
        composed.fail("model", other)
    elif is_of_a_run(file.raw, composed.schemas.config_of):
        options = _options_typed(line, composed)
        every_key = composed.schemas.every_key
        composed.raw = run_again(file.raw, composed.raw, options, composed.schema, every_key)
    else:
        _overlay_mindformers(composed, line, file)


def _other_model(composed: Composed, line: CommandLine, file: ConfigFile) -> str:
    """The error of a file for another model than the chosen one; "" for none."""
    arch, chosen = arch_of(file.raw), at(composed.raw, "model.arch.type")
    if arch in (None, chosen):
        models = options_of("model", composed.folders)
        return blended(line.settings, file, composed.raw, models) or ""
    text = f"model.arch.type: got {show(arch)} (in {file.source}), but the model chosen is {chosen}"
    return text + ("; leave model= out to run the file's" if _typed(line, "model") else "")


def _overlay_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Translate a MindFormers yaml to our keys; keys without effect are listed in a note."""
    where, models = f" (in {file.source})", options_of("model", composed.folders)
    every = leaves(composed.schema, composed.raw)
    others = composed.others
    # A MindFormers key that is ours only with another run mode is ignored here.
    known = {key for key in every if key not in IGNORED or key in composed.raw}
    known |= {key for key in others if key not in IGNORED}
    named = at(file.raw, "trainer.model_name") in models or arch_of(file.raw) is None
    result = translate(
        file.raw,
        known,
        models,
        defaults=composed.section("model.model_config"),
        use_parallel=_uses_parallel(composed, line, file),
        sized=named or bool(_typed(line, "model")) or "model" in file.choices,
    )
    for text in result.faults:
        composed.fail(text.partition(":")[0], text + where)
    typed = {setting.key for setting in line.settings}
    online = composed.raw.get("backend") == "ms" and composed.raw.get("run_mode") != "export"
    devices = _typed(line, "context.device_target")
    device = devices[-1] if devices else result.assignments.get("context.device_target")
    for key, value in result.assignments.items():
        # MindFormers' example yamls hold keys of online and of offline runs.
        of_offline = online and key.startswith(OFFLINE_ONLY)
        if of_offline or (device == "CPU" and key in ASCEND_ONLY) or key in others:
            result.ignored.append(key)
        elif key not in GROUPS and key not in typed:
            # In MindFormers a null path is an empty value.
            takes = every[key]
            empty = value is None and accepts(takes, str) and not accepts(takes, types.NoneType)
            composed.assign(key, "" if empty else value, where)
    if result.ignored:
        composed.notes.append(_ignored(result.ignored, file.source))


def _uses_parallel(composed: Composed, line: CommandLine, file: ConfigFile) -> bool:
    """use_parallel of the command line, else of the file, else as composed."""
    typed = [value for value in _typed(line, "use_parallel") if isinstance(value, str)]
    if typed:
        return typed[-1].lower() != "false"
    return bool(file.raw.get("use_parallel", composed.raw.get("use_parallel")))


def _typed(line: CommandLine, key: str) -> list[str | list[str]]:
    """The values of a key on the command line, in order."""
    return [setting.value for setting in line.settings if setting.key == key]


def _ignored(keys: Collection[str], source: str) -> Note:
    count = len(set(keys))
    which = "1 key" if count == 1 else f"{count} keys"
    has = "has" if count == 1 else "have"
    return Note(
        f"{which} of {source} {has} no effect here (format_keys in run.log, and with verbosity=2)",
        f"no effect here, of {source}: {format_keys(keys)}",
    )


def _options_typed(line: CommandLine, composed: Composed) -> list[dict[str, Any]]:
    """The yaml files of the group options on the command line."""
    named = [(s.key, str(s.value)) for s in line.settings if s.key in GROUPS and not s.prefix]
    return [raw for group, name in named for raw in files_of(group, name, composed.folders)]


def export_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Write graphs where run_mode=export of run_mindformer does: a folder in output_dir per graph,
    overwritten. Only for its yamls, and without keys of our own exports."""
    if not _is_mindformers_export(composed, line, file.raw):
        return
    typed = {setting.key for setting in line.settings}
    output = composed.raw["output_dir"] if "output_dir" in {*typed, *file.raw} else "./output"
    for key, folder in MINDFORMERS_EXPORT.items():
        composed.raw["infer"][key] = f"{output}/{folder}/rank_0"
    if "overwrite" not in typed:
        composed.raw["overwrite"] = True


def move_mindformers_flags(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """Move flags of keys that only MindFormers has to its yaml."""
    raw = copy.deepcopy(file.raw)
    moved = [s for s in line.settings if s.flag and is_only_mindformers(s.key)]
    for setting in moved:
        put(raw, setting.key, str(setting.value))
    kept = [setting for setting in line.settings if setting not in moved]
    return replace(line, settings=kept), replace(file, raw=raw)


def _is_mindformers_export(composed: Composed, line: CommandLine, file: Mapping[str, Any]) -> bool:
    """Whether a yaml is exported as run_mindformer does, without keys of our own exports."""
    raw = composed.raw
    ours = (
        *("export_output", "quant", "infer.prefill_model_path", "infer.increment_model_path"),
        *("infer.model_dir", "infer.enc_key", "export.weight_fp16"),
    )
    free: dict[str, tuple[str | None, ...]] = {
        "engine": ("auto",),
        "export.layout": ("auto",),
        "export.target": ("auto", "Ascend"),
        "infer.model_type": (None, "mindir"),
    }
    asked = file.get("run_mode") == "export" or any(
        setting.flag and setting.key == "run_mode" for setting in line.settings
    )
    return (
        bool(line.config_files)
        and not is_of_a_run(file, composed.schemas.config_of)
        and asked
        and raw.get("run_mode") == "export"
        and not any(at(raw, key) for key in ours)
        and all(at(raw, key) in values for key, values in free.items())
    )
