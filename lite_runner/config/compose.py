"""conf/ + file + command line -> one validated `RunConfig`, or one error with all errors.

Hydra composes the groups; the file and the settings are merged over its result and validated
against the dataclasses: no key is added, and no text of a command line is interpolated. A file is a
yaml of MindFormers, of our keys, or of an earlier run; -m makes a job of every combination of swept
values.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lite_runner.architectures import networks
from lite_runner.config.argv import SEARCHPATH, CommandLine, Setting, is_of_hydra
from lite_runner.config.choices import (
    ConfigFile,
    bare_words,
    blended,
    exists,
    options_chosen,
    read_config,
    user_folders,
    with_checkpoint,
    with_own_groups,
    without_file,
)
from lite_runner.config.composed import Composed, Schemas, run_again
from lite_runner.config.fields import (
    Invalid,
    Note,
    accepts,
    annotation_of,
    at,
    hints_of,
    leaves,
    put_at,
    raise_errors,
    read,
    show,
    without,
)
from lite_runner.config.generation import without_effect
from lite_runner.config.grammar import is_sweep, swept_values, value_of, with_references
from lite_runner.config.groups import (
    GROUPS,
    compose_groups,
    conf_dir,
    downloaded_weights,
    options_named_in,
    options_of,
    own_groups,
    own_source,
    values_of,
)
from lite_runner.config.mindformers import (
    IGNORED,
    arch_of,
    format_keys,
    is_only_mindformers,
    translate,
)
from lite_runner.config.mindformers_training import with_evaluation, with_training
from lite_runner.config.model_dir import with_export, with_model
from lite_runner.config.offline_checks import with_backend
from lite_runner.config.prompts import STANDARD_INPUT
from lite_runner.config.sampling_checks import typed_errors
from lite_runner.config.schema import ExportedOptions, RunConfig, SamplingOptions
from lite_runner.config.sections import ASCEND_KEYS
from lite_runner.errors import ConfigError

MAX_JOBS = 1_000
# Keys that only exported models have.
OFFLINE_ONLY = ("infer.", "model.model_config.is_sample_acceleration")
ASCEND_ONLY = tuple(f"context.{key}" for key in ASCEND_KEYS)
MINDFORMERS_LOGS = "output/msrun_log"  # of the ranks that msrun starts
# Where run_mode=export of run_mindformer writes the graphs.
MINDFORMERS_EXPORT = {
    "prefill_model_path": "mindir_full_checkpoint",
    "increment_model_path": "mindir_inc_checkpoint",
}
# What a typed option of a group says: these keys, and what it sets apart from the usual option. The
# rest of it are defaults, which a file overrides.
_SAID_BY_OPTION: Mapping[str, Collection[str]] = {
    "parallel": (
        *("use_parallel", "parallel.parallel_mode", "parallel_config.data_parallel"),
        *("parallel_config.model_parallel", "parallel_config.pipeline_stage"),
    ),
    "ge": ("infer.ge_preset", "infer.ge_options"),
    "backend": ("backend",),
}
_OF_A_MODEL = ("model.", "trainer.", "processor.")  # defaults, too
_SETTINGS = "model.model_config"
# Keys, and those that take precedence over them: where only the first is typed, a file's others
# are open again.
_PRECEDENCE: Mapping[str, Collection[str]] = {
    **{
        f"{_SETTINGS}.{name}": (name,)
        for name in ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")
    },
    f"{_SETTINGS}.eos_token_id": ("eos_token_id",),
    f"{_SETTINGS}.max_new_tokens": ("max_new_tokens", "max_length"),
    f"{_SETTINGS}.max_decode_length": (
        *("max_new_tokens", "max_length", f"{_SETTINGS}.max_new_tokens"),
    ),
    "max_length": ("max_new_tokens",),
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p"), ("do_sample",)),
    f"{_SETTINGS}.checkpoint_name_or_path": ("load_checkpoint",),
    "infer.model_dir": tuple(f"infer.{name}" for name in MINDFORMERS_EXPORT),
    "infer.prefill_model_path": ("infer.model_dir",),
    "export_output": tuple(f"infer.{name}" for name in MINDFORMERS_EXPORT),
}


def resolve(line: CommandLine, schemas: Schemas) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user.

    Raises ConfigError with all validation errors: of keys, types and ranges, and of combinations.
    """
    composed = compose_line(line, schemas)
    checked: list[Invalid] = []
    config = read(composed.raw, composed.schema, "", checked)
    faulty = {key for error in composed.errors for key in error.keys}
    # Errors that follow from others only distract.
    errors = composed.errors + [f for f in checked if not faulty.intersection(f.keys)]
    if isinstance(config, ExportedOptions):
        config = with_backend(config, errors, composed.notes)
    if config is not None:
        typed = {setting.key for setting in line.settings}
        found = [*schemas.errors(config), *typed_errors(config, typed)]
        errors += [f for f in found if not faulty.intersection(f.keys)]
    raise_errors(errors)
    assert config is not None
    notes = [*composed.notes, *map(Note, schemas.notes(config))]
    if isinstance(config, SamplingOptions) and (idle := without_effect(vars(config))):
        notes.append(Note(idle))
    return config, notes


def compose_line(line: CommandLine, schemas: Schemas) -> Composed:
    """Groups, file and settings merged; errors of keys and values are collected, not raised."""
    # A malformed prompt is not reported as missing too.
    early = [
        Invalid(("predict_data",) if "predict_data" in text else (), text) for text in line.errors
    ]
    try:
        file = read_config(line.config_files, line.config, schemas.is_of_a_run)
    except ConfigError as error:
        instead = without_file(line.config_files, options_of("model"))
        early.append(Invalid(("model", "predict_data"), error.message + instead))
        file = ConfigFile()
    line, file = leave_out(line, file)
    early += file.errors
    try:
        folders = user_folders(line, file)
    except ConfigError as error:
        early.append(Invalid(("model",), error.message))
        folders = ()
    models = options_of("model", folders)
    line, own = with_own_groups(line, folders, early)
    if line.bare:
        early.append(Invalid(("predict_data",), bare_words(line, models)))
    line, file = with_model(with_export(line, file, models), file)
    line, errors = with_checkpoint(line, file, models)
    early += errors
    line, file = move_mindformers_flags(line, file)
    choices = options_chosen(line.settings, file, folders, early)
    raw = compose_groups(choices | {f"+{group}": name for group, name in own.items()}, folders)
    schema = schemas.of(raw.get("run_mode"))
    if "infer" not in {field.name for field in dataclasses.fields(schema)}:
        raw.pop("infer", None)  # of the group ge
    composed = Composed(raw, schemas, schema, choices, own, folders, early)
    if line.action == "run" and (file.hydra or file.hydra_choices):
        composed.notes.append(Note(f"hydra (in {file.source}) has an effect with --multirun alone"))
    if "ge" in choices and "infer" not in raw:
        composed.fail("ge", composed.no_effect("ge", "infer.ge_preset"))
    if file.raw:
        file = with_values(composed, line, file)
        overlay_file(composed, line, file)
    last = {setting.key: setting for setting in line.settings}
    for setting in line.settings:
        chosen = setting.key in GROUPS and not setting.prefix
        # Of another run mode's key it is the last value that counts: it may leave the key open.
        replaced = setting is not last[setting.key] and setting.key in composed.others
        if setting.key != SEARCHPATH and not chosen and not replaced:
            composed.set(setting)
    unset_overridden(composed, line)
    _name_weights(composed)
    export_as_mindformers(composed, line, file)
    if line.mindformer:
        run_as_mindformers(composed, line, file)
    return composed


def _name_weights(composed: Composed) -> None:
    """Resolve a model's name in load_checkpoint, MindFormers' way to name its published weights;
    those that lie in checkpoint_download/ are taken from there."""
    raw, settings = composed.raw, composed.section("model.model_config")
    name = raw.get("load_checkpoint")
    if name in options_of("model", composed.folders) and not exists(name):
        groups = compose_groups({"model": name}, composed.folders)
        usual = groups["model"]["model_config"]["checkpoint_name_or_path"]
        raw["load_checkpoint"] = str(downloaded_weights(name) or usual)
    if raw.get("load_checkpoint") or raw.get("pretrained_model_dir"):
        return
    name, source = at(raw, "trainer.model_name"), settings.get("checkpoint_name_or_path")
    found = downloaded_weights(name) if isinstance(name, str) else None
    if found and source and source == own_source(name):
        settings["checkpoint_name_or_path"] = str(found)
        composed.notes.append(Note(f"{name}: its weights are those of {found}, not {source}"))


def jobs_of(
    line: CommandLine, schemas: Schemas
) -> list[tuple[list[Setting], RunConfig, list[Note]]]:
    """(chosen values of swept keys, config, notes) of each job, all checked before any runs.

    A text is never swept: a comma in a prompt is a comma. Raises ConfigError with the errors
    of every job.
    """
    line = replace(line, settings=[s for s in line.settings if not is_of_hydra(s)])
    folders = user_folders(line, read_config(line.config_files, None, schemas.is_of_a_run))
    axes = [_values(setting.key, setting.value, folders, schemas) for setting in line.settings]
    count = 1
    for axis in axes:
        count *= len(axis)
    if not 0 < count <= MAX_JOBS:
        raise ConfigError(f"-m: got {count} jobs, expected 1 to {MAX_JOBS}")
    jobs, errors = [], []
    for values in itertools.product(*axes):
        settings = [
            dataclasses.replace(setting, value=value)
            for setting, value in zip(line.settings, values, strict=True)
        ]
        swept = [s for s, axis in zip(settings, axes, strict=True) if len(axis) > 1]
        label = " ".join(map(str, swept))
        try:
            job = dataclasses.replace(line, settings=settings)
            config, notes = resolve(job, schemas)
        except ConfigError as error:
            errors.append(f"{label}: {error.message}" if label else error.message)
        else:
            reads = getattr(config, "predict_data", None)
            if reads == STANDARD_INPUT and count > 1:
                errors.append("predict_data=-: standard input can be read by one job only")
            jobs.append((swept, config, notes))
    if errors:
        raise ConfigError.of(list(dict.fromkeys(errors)))
    return jobs


def swept_settings(line: CommandLine, schemas: Schemas) -> list[Setting]:
    """The settings of a line that list or describe several values; a text never does."""
    folders = user_folders(line, read_config(line.config_files, None, schemas.is_of_a_run))
    return [
        setting
        for setting in line.settings
        if isinstance(setting.value, str)
        and _may_be_swept(setting.key, folders, schemas)
        and is_sweep(setting.value)
    ]


def _may_be_swept(key: str, folders: Sequence[Path], schemas: Schemas) -> bool:
    if key in (*GROUPS, *own_groups(folders)):
        return True
    modes = schemas.run_modes_with(key)
    schema = schemas.config_of(modes[0]) if modes else RunConfig
    annotation = annotation_of(key, leaves(schema))
    return annotation is not None and not accepts(annotation, str)


def _values(
    key: str, value: str | list[str], folders: Sequence[Path], schemas: Schemas
) -> list[str | list[str]]:
    if isinstance(value, list) or not _may_be_swept(key, folders, schemas):
        return [value]
    group = key in (*GROUPS, *own_groups(folders))
    try:
        return [*swept_values(value, options_of(key, folders) if group else [])]
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from None


def overlay_file(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Merge a yaml of MindFormers or of an earlier run; errors are collected."""
    if any("model" in error.keys for error in composed.errors):
        return
    if other := _other_model(composed, line, file):
        composed.fail("model", other)
    elif composed.schemas.is_of_a_run(file.raw):
        said = _said_by_options(line, composed)
        if line.values("model"):  # a former run's is another one
            said |= values_of("model", composed.choices["model"], composed.folders).keys()
        every_key = composed.schemas.every_key
        composed.raw = run_again(file.raw, composed.raw, said, composed.schema, every_key)
    else:
        _overlay_mindformers(composed, line, file)


def with_values(composed: Composed, line: CommandLine, file: ConfigFile) -> ConfigFile:
    """The file with the values of other keys that it refers to: typed, its own, or of the groups;
    errors are collected."""
    typed = {setting.key: setting.value for setting in line.settings}
    said = _said_by_options(line, composed)
    known = leaves(composed.schema, composed.raw)

    def find(key: str) -> Any:
        text = typed.get(key)
        if isinstance(text, str) and key in known:
            return value_of(text, known[key])
        for raw in (composed.raw,) if key in said else (file.raw, composed.raw):
            value: Any = raw
            for name in key.split("."):
                if isinstance(value, list) and name.isdigit() and int(name) < len(value):
                    value = value[int(name)]
                elif isinstance(value, Mapping) and name in value:
                    value = value[name]
                else:
                    break
            else:
                return value
        raise KeyError(key)

    where = f" (in {file.source})"
    return replace(file, raw=with_references(file.raw, find, where, composed.errors))


def _other_model(composed: Composed, line: CommandLine, file: ConfigFile) -> str:
    """The error of a file for another model than the chosen one; "" for none."""
    arch, chosen = arch_of(file.raw), at(composed.raw, "model.arch.type")
    if arch in (None, chosen):
        models = options_of("model", composed.folders)
        return blended(line.settings, file, composed.raw, models) or ""
    text = f"model.arch.type: got {show(arch)} (in {file.source})"
    if arch not in (*networks(), "auto"):
        there = ", ".join(sorted(networks()))
        return f"model.arch.type: {arch} is not supported (in {file.source}); there are {there}"
    text = f"{text}, but the model chosen is {chosen}"
    return text + ("; leave model= out to run the file's" if line.values("model") else "")


def _overlay_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Translate a MindFormers yaml to our keys; keys without effect are listed in a note."""
    where, models = f" (in {file.source})", options_of("model", composed.folders)
    if composed.raw.get("run_mode") == "finetune":
        trained, told, wrong = with_training(file.raw)
        file = replace(file, raw=trained)
        composed.notes += [Note(text + where) for text in told]
        for text in wrong:
            composed.fail(text.partition(":")[0], text + where)
    elif composed.raw.get("run_mode") == "eval":
        translated, told = with_evaluation(file.raw)
        file = replace(file, raw=translated)
        composed.notes += [Note(text + where) for text in told]
    every = leaves(composed.schema, composed.raw)
    others = composed.others
    # A MindFormers key that is ours only with another run mode, or model, is ignored here.
    raw = composed.raw
    known = {key for key in every if key not in IGNORED or key in raw or at(raw, key) is not None}
    known |= {key for key in others if key not in IGNORED}
    named = at(file.raw, "trainer.model_name") in models or arch_of(file.raw) is None
    result = translate(
        file.raw,
        known,
        models,
        defaults=composed.section("model.model_config"),
        use_parallel=_uses_parallel(composed, line, file),
        sized=named or bool(line.values("model")) or "model" in file.choices,
    )
    for text in result.errors:
        key = text.partition(":")[0]
        composed.fail(key, f"--{text}" if key in file.flags else text + where)
    typed = {setting.key for setting in line.settings} | _said_by_options(line, composed)
    backend = composed.choices.get("backend", "native")  # where none is named: online
    online = backend in ("native", "ms") and composed.raw.get("run_mode") != "export"
    device = line.last("context.device_target") or result.assignments.get("context.device_target")
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
    if typed := line.last("use_parallel"):
        return typed.lower() != "false"
    if "use_parallel" in _said_by_options(line, composed):
        return bool(composed.raw["use_parallel"])
    return bool(file.raw.get("use_parallel", composed.raw.get("use_parallel")))


def _ignored(keys: Collection[str], source: str) -> Note:
    count = len(set(keys))
    which = "1 key" if count == 1 else f"{count} keys"
    has = "has" if count == 1 else "have"
    return Note(
        f"{which} of {source} {has} no effect here (format_keys in run.log, and with verbosity=2)",
        f"no effect here, of {source}: {format_keys(keys)}",
    )


def _said_by_options(line: CommandLine, composed: Composed) -> set[str]:
    """The dotted keys that the typed options of groups stand for."""
    usual_options = options_named_in(conf_dir() / "config.yaml")
    said: set[str] = set()
    for group in {s.key for s in line.settings if s.key in GROUPS and not s.prefix}:
        option = composed.choices.get(group)
        if option is not None and group != "run_mode":  # all of that are defaults
            usual = values_of(group, usual_options[group])
            said.update(_SAID_BY_OPTION.get(group, ()))
            said |= {
                key
                for key, value in values_of(group, option, composed.folders).items()
                if value not in (None, "", usual.get(key)) and not key.startswith(_OF_A_MODEL)
            }
    for group, option in composed.own.items():
        said |= values_of(group, option, composed.folders).keys()
    return said


def unset_overridden(composed: Composed, line: CommandLine) -> None:
    """Unset the keys of a file that would take precedence over typed ones."""
    typed = {setting.key for setting in line.settings}
    every = leaves(composed.schema, composed.raw)
    for key in typed & _PRECEDENCE.keys():
        if at(composed.raw, key) in (None, ""):
            continue
        for above in _PRECEDENCE[key]:
            samples = above == "do_sample" and not key.endswith(above) and composed.raw.get(above)
            if above in every and above not in typed and not samples:
                empty = None if accepts(every[above], types.NoneType) else ""
                put_at(composed.raw, above, empty)


def export_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Write graphs where run_mode=export of run_mindformer does: a folder in output_dir per graph,
    overwritten. Only for its yamls, and without keys of our own exports."""
    if not _is_mindformers_export(composed, line, file.raw):
        return
    typed = {setting.key for setting in line.settings}
    output = composed.raw["output_dir"] if "output_dir" in {*typed, *file.raw} else "./output"
    for key, folder in MINDFORMERS_EXPORT.items():
        if key == "prefill_model_path" or at(composed.raw, "model.model_config.use_past"):
            composed.raw["infer"][key] = f"{output}/{folder}/rank_0"
    if "overwrite" not in typed:
        composed.raw["overwrite"] = True


def run_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Print answers in MindFormers' form, and keep the logs of ranks in its folder, unless the
    keys are given."""

    def given(key: str) -> bool:
        return bool(line.values(key)) or at(file.raw, key) is not None

    schema: Any = composed.schema
    formats = get_args(hints_of(schema).get("output_format"))
    if "mindformers" in formats and not given("output_format"):
        composed.raw["output_format"] = "mindformers"
    if composed.raw["use_parallel"] is True and not given("parallel.log_dir"):
        composed.raw["parallel"]["log_dir"] = MINDFORMERS_LOGS


def leave_out(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """Take the keys that are typed as ~key out of a file; others stay, to be refused."""
    raw, kept = file.raw, []
    for setting in line.settings:
        rest = without(raw, setting.key)
        meant = setting.prefix == "~" and setting.value in ("", str(at(raw, setting.key)))
        if meant and rest != raw:
            raw = rest
        else:
            kept.append(setting)
    return replace(line, settings=kept), replace(file, raw=raw)


def move_mindformers_flags(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """Move flags of keys that only MindFormers has to its yaml."""
    raw = copy.deepcopy(file.raw)
    moved = [s for s in line.settings if s.flag and is_only_mindformers(s.key)]
    if moved:
        import yaml

    for setting in moved:
        try:
            value = yaml.safe_load(str(setting.value))
        except yaml.YAMLError:
            value = str(setting.value)
        put_at(raw, setting.key, value)
    kept = [setting for setting in line.settings if setting not in moved]
    return replace(line, settings=kept), replace(
        file, raw=raw, flags=frozenset(setting.key for setting in moved)
    )


def _is_mindformers_export(composed: Composed, line: CommandLine, file: Mapping[str, Any]) -> bool:
    """True if a yaml is exported as run_mindformer does, without keys of our own exports."""
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
        and not composed.schemas.is_of_a_run(file)
        and asked
        and raw.get("run_mode") == "export"
        and not any(at(raw, key) for key in ours)
        and all(at(raw, key) in values for key, values in free.items())
    )
