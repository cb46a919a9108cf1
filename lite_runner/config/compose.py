"""conf/ + file + command line -> one validated `RunConfig`, or one error with all faults.

Hydra composes the groups; the file and the settings are merged over its result and validated
against the dataclasses: no key is added, no text is interpolated.
"""

from __future__ import annotations

import dataclasses

from lite_runner.config.argv import CommandLine
from lite_runner.config.choices import (
    SEARCHPATH,
    bare_words,
    is_there,
    options_chosen,
    user_folders,
    with_checkpoint,
)
from lite_runner.config.composed import Composed, Schemas
from lite_runner.config.config_file import ConfigFile, read_config
from lite_runner.config.fields import Fault, Note, raise_faults, read
from lite_runner.config.ge import ge_notes
from lite_runner.config.groups import GROUPS, compose_groups, options_of
from lite_runner.config.lengths import typed_faults
from lite_runner.config.model_dir import with_model
from lite_runner.config.overlay import export_as_mindformers, move_mindformers_flags, overlay_file
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError


def resolve(line: CommandLine, schemas: Schemas) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user.

    Raises ConfigError with all validation errors: of keys, types and ranges, and of combinations.
    """
    composed = compose_line(line, schemas)
    checked: list[Fault] = []
    config = read(composed.raw, composed.schema, "", checked)
    faulty = {key for fault in composed.faults for key in fault.keys}
    # Errors that follow from others only distract.
    faults = composed.faults + [f for f in checked if not faulty.intersection(f.keys)]
    if config is not None:
        typed = {setting.key for setting in line.settings}
        found = [*schemas.faults(config), *typed_faults(config, typed)]
        faults += [f for f in found if not faulty.intersection(f.keys)]
    raise_faults(faults)
    assert config is not None
    return config, [*composed.notes, *map(Note, ge_notes(config))]


def compose_line(line: CommandLine, schemas: Schemas) -> Composed:
    """Groups, file and settings merged; errors of keys and values are collected, not raised."""
    # A malformed prompt is not reported as missing too.
    early = [
        Fault(("predict_data",) if "predict_data" in text else (), text) for text in line.faults
    ]
    try:
        file = read_config(line.config_files, line.config)
    except ConfigError as error:
        early.append(Fault(("model", "predict_data"), error.message))
        file = ConfigFile()
    early += [Fault((), text) for text in file.faults]
    try:
        folders = user_folders(line, file)
    except ConfigError as error:
        early.append(Fault(("model",), error.message))
        folders = ()
    models = options_of("model", folders)
    if line.bare:
        early.append(Fault(("predict_data",), bare_words(line, models)))
    line, file = with_model(line, file)
    line, faults = with_checkpoint(line, file, models)
    early += faults
    line, file = move_mindformers_flags(line, file)
    choices = options_chosen(line.settings, file, folders, early)
    raw = compose_groups(choices, folders)
    schema = schemas.of(raw.get("run_mode"))
    if "infer" not in {field.name for field in dataclasses.fields(schema)}:
        raw.pop("infer", None)  # of the group ge
    composed = Composed(raw, schemas, schema, choices, folders, early)
    if "ge" in choices and "infer" not in raw:
        composed.fail("ge", composed.no_effect("ge", "infer.ge_preset"))
    if file.raw:
        overlay_file(composed, line, file)
    last, others = {setting.key: setting for setting in line.settings}, composed.others
    for setting in line.settings:
        chosen = setting.key in GROUPS and not setting.prefix
        # Of another run mode's key it is the last value that counts: it may leave the key open.
        replaced = setting.key in others and setting is not last[setting.key]
        if setting.key != SEARCHPATH and not chosen and not replaced:
            composed.set(setting)
    _name_weights(composed)
    export_as_mindformers(composed, line, file)
    return composed


def _name_weights(composed: Composed) -> None:
    """Resolve a model's name in load_checkpoint, MindFormers' way to name its published weights."""
    name = composed.raw.get("load_checkpoint")
    if name in options_of("model", composed.folders) and not is_there(name):
        groups = compose_groups({"model": name}, composed.folders)
        settings = groups["model"]["model_config"]
        composed.raw["load_checkpoint"] = settings["checkpoint_name_or_path"]
