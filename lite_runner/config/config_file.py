"""The yaml files of --config: read, laid over one another and over the groups.

A file is a yaml of MindFormers, of our keys, or of an earlier run. Its `defaults` choose options of
the groups, as in a config of Hydra's own; `hydra.searchpath` names folders with more of them.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from lite_runner.architectures import networks
from lite_runner.architectures.settings import Settings
from lite_runner.config import (
    MAX_DEPTH,
    Invalid,
    Note,
    accepts,
    at,
    did_you_mean,
    hints_of,
    invalid,
    leaves,
    nearest,
    put_at,
    show,
    without,
)
from lite_runner.config.argv import MODEL_KEYS, CommandLine, ConfigFile, Setting, value_of
from lite_runner.config.generation import SAMPLING
from lite_runner.config.grammar import with_environment, with_references
from lite_runner.config.groups import (
    GROUPS,
    conf_dir,
    exists,
    option_files,
    options_named_in,
    options_of,
    own_groups,
    values_of,
)
from lite_runner.config.mindformers import (
    IGNORED,
    arch_of,
    base_model,
    format_keys,
    is_only_mindformers,
    translate,
)
from lite_runner.config.sections import ASCEND_KEYS
from lite_runner.errors import ConfigError
from lite_runner.system.yaml_file import read_yaml

if TYPE_CHECKING:
    from lite_runner.config.compose import Composed, Schemas

_SELF = "_self_"
OF_HYDRA = ("hydra/launcher", "hydra/sweeper")
_OF_SWEEPS = ("callbacks", "launcher", "sweep", "sweeper")  # keys of `hydra` in a file
_SIZES = ("hidden_size", "num_layers", "num_heads", "vocab_size")  # keys that tell two models apart


def read_files(
    line: CommandLine, schemas: Schemas, errors: list[Invalid]
) -> tuple[CommandLine, ConfigFile]:
    """The files of a line, and the line without what it only takes out of them (~key)."""
    try:
        file = read_config(line.config_files, line.config, schemas)
    except ConfigError as error:
        instead = _without_file(line.config_files, options_of("model"))
        errors.append(Invalid(("model", "predict_data"), error.message + instead))
        return line, ConfigFile()
    line, file = _leave_out(line, file)
    errors += file.errors
    return line, file


def read_config(
    paths: Sequence[str], held: Mapping[str, Any] | None, schemas: Schemas
) -> ConfigFile:
    """The files `paths`, each laid over those before it, or what a script holds in their place.

    Nothing is interpolated in the config of an earlier run. Raises ConfigError for a file that
    cannot be read.
    """
    config = ConfigFile(" and ".join(paths) or ("the flags" if held is None else "the config"))
    files = [(path, read_yaml(Path(path))) for path in paths] or [("", dict(held or {}))]
    for path, raw in files:
        take_hydra(config, path, raw)
        if path and not schemas.is_of_a_run(raw):
            raw = with_environment(raw, f" (in {path})", config.errors)
        _take_defaults(config, path, raw)
        if differs := _another_model(config.raw, raw):
            before = " and ".join(paths[: paths.index(path)])
            config.fail(f"--config: {path} describes another model than {before} ({differs})")
        config.raw = merged(config.raw, raw)
    return config


def merged(
    below: Mapping[str, Any], above: Mapping[str, Any], depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Deep-merge `above` over `below`."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if depth and isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value, depth - 1)
        result[key] = value
    return result


def _another_model(below: Mapping[str, Any], above: Mapping[str, Any]) -> str:
    """The first setting that shows two files to be of different models; "" for none."""
    if not all(any(at(raw, key) is not None for key in MODEL_KEYS) for raw in (below, above)):
        return ""
    for key in (*MODEL_KEYS, *(f"model.model_config.{name}" for name in _SIZES)):
        first, second = at(below, key), at(above, key)
        if None not in (first, second) and first != second:
            return f"{key} {show(second)}, not {show(first)}"
    return ""


def _take_defaults(config: ConfigFile, path: str, raw: dict[str, Any]) -> None:
    """Move `defaults` and `hydra.searchpath` from a file's data to `config`."""
    where = f" (in {path})" if path else ""
    entries = raw.pop("defaults", None) or []
    if not isinstance(entries, list):
        config.fail(f"defaults: got {show(entries)}{where}, expected a list")
        entries = []
    for i, entry in enumerate(entries):
        if entry == _SELF:
            if i < len(entries) - 1:
                config.fail(
                    f"defaults: {_SELF} is not the last entry{where}: the file's own keys always"
                    " override the options"
                )
        elif isinstance(entry, dict) and len(entry) == 1:
            [(group, option)] = entry.items()
            group = str(group).removeprefix("override ").lstrip("/")
            if group in GROUPS:
                config.choices[group] = str(option)
            elif group in OF_HYDRA:
                config.hydra_choices[group] = str(option)
            else:
                listed = ", ".join(GROUPS)
                config.fail(f"defaults: got {group}{where}, expected one of {listed}")
        else:
            config.fail(
                f"defaults: got {show(entry)}{where}, expected GROUP: OPTION or {_SELF};"
                " several files are given as --config A --config B"
            )
    hydra = raw.get("hydra")
    if isinstance(hydra, Mapping) and "searchpath" in hydra:
        raw["hydra"] = {key: value for key, value in hydra.items() if key != "searchpath"}
        folders = hydra["searchpath"] or []
        if isinstance(folders, list) and all(isinstance(entry, str) for entry in folders):
            config.searchpath += folders
        else:
            config.fail(f"hydra.searchpath: got {show(folders)}{where}, expected a list")
    raw.pop("hydra", None)


def take_hydra(config: ConfigFile, path: str, raw: dict[str, Any]) -> None:
    """Move Hydra's settings of a sweep from a file's data to `config`; its references stay
    unresolved."""
    where = f" (in {path})" if path else ""
    section = raw.get("hydra")
    if not isinstance(section, Mapping):
        return
    own = {key: value for key, value in section.items() if key != "searchpath"}
    raw["hydra"] = {key: value for key, value in section.items() if key == "searchpath"}
    for text in _hydra_errors(own):
        config.fail(text + where)
    config.hydra = merged(config.hydra, {key: own[key] for key in own if key in _OF_SWEEPS})


def _hydra_errors(section: Mapping[str, Any]) -> Iterator[str]:
    """Validation errors of a file's `hydra`: an untrusted file must not run code."""
    for key, value in section.items():
        if key not in _OF_SWEEPS:
            yield f"hydra.{key}: Hydra's own settings are not used here"
            continue
        if key != "callbacks" and "_target_" in _names(value):
            yield f"hydra.{key}: _target_ is not taken from a file: override hydra/{key}: NAME"
        if not isinstance(value, Mapping):
            yield f"hydra.{key}: got {show(value)}, expected a section"
        elif key == "launcher":
            for name in (name for name, part in value.items() if isinstance(part, list | Mapping)):
                yield (
                    f"hydra.launcher.{name}: lists and sections, which may hold commands, are not"
                    " taken from a file: type them"
                )
        elif key == "callbacks":
            for name, part in value.items():
                inner = part.values() if isinstance(part, Mapping) else [part]
                if "_target_" in set().union(*map(_names, inner)):
                    yield f"hydra.callbacks.{name}: expected one _target_, a callback of Hydra's"


def _names(value: Any, depth: int = MAX_DEPTH) -> set[str]:
    """Every key in nested data."""
    inner = value.values() if isinstance(value, Mapping) else value
    if not depth or not isinstance(value, Mapping | list):
        return set()
    own = set(map(str, value)) if isinstance(value, Mapping) else set()
    return own.union(*(_names(one, depth - 1) for one in inner))


_GLOBAL = "# @package _global_"  # without it keys are below the group's name


def _without_file(paths: Sequence[str], models: Collection[str]) -> str:
    """The hint for a missing yaml that a model of conf/ has in its name, such as
    MindFormers' predict_llama2_7b.yaml; "" where none has."""
    for stem in (Path(path).stem for path in paths if not exists(path)):
        named = [one for one in models if re.search(rf"(^|_){re.escape(one)}(_|$)", stem)]
        if named:
            return f"; without the file: model={max(named, key=len)}"
    return ""


def with_own_groups(
    line: CommandLine, folders: Sequence[Path], errors: list[Invalid]
) -> tuple[CommandLine, dict[str, str]]:
    """A line without the options of the user's own groups (+GROUP=OPTION), which are returned too.
    What they choose of our groups is as if it were typed before the rest."""
    own: dict[str, str] = {}
    groups = own_groups(folders)
    for setting in line.settings:
        group, option = setting.key, str(setting.value)
        if group not in groups:
            continue
        options = options_of(group, folders)
        if setting.prefix != "+":
            text = f"{setting}: {group} is a group of yours: +{group}={option} adds an option of it"
            errors.append(invalid(group, text))
        elif option not in options:
            near = did_you_mean(nearest(option, options))
            text = f"+{group}: got {show(option)}, expected one of {', '.join(options)}{near}"
            errors.append(invalid(group, text))
        else:
            own[group] = option
    chosen: dict[str, str] = {}
    for group, option in own.items():
        for path in option_files(group, option, folders):
            if _GLOBAL not in path.read_text(encoding="utf-8"):
                errors.append(invalid(group, f"{path}: expected '{_GLOBAL}' as its first line"))
            chosen = options_named_in(path) | chosen
    settings = [Setting(group, name) for group, name in chosen.items() if group in GROUPS]
    settings += [setting for setting in line.settings if setting.key not in groups]
    return replace(line, settings=settings), own


def blended(
    settings: Sequence[Setting],
    file: ConfigFile,
    chosen: Mapping[str, Any],
    models: Collection[str],
) -> str:
    """The error of a file and a typed model= of different models, which a run would mix; "" where
    they match.

    `chosen`: the composed groups.
    """
    typed = next((str(s.value) for s in reversed(settings) if s.key == "model"), None)
    base = file.choices.get("model") or base_model(file.raw, models)
    if typed is None or typed == base or not file.names_model(models):
        return ""
    name = at(file.raw, "trainer.model_name")
    own = at(chosen, "model.model_config") or {}
    differs = [f"model_name {name}"] if name in models else []
    # The keys that identify the model; the context length may be chosen.
    sizes = {*own} - {*hints_of(Settings), "seq_length", "type"}
    for key in sorted(sizes):
        value = at(file.raw, f"model.model_config.{key}")
        if None not in (value, own.get(key)) and value != own[key]:
            differs.append(f"{key} {show(value)}, not {show(own[key])}")
    if not differs:
        return ""
    return (
        f"model: got {typed}, but {file.source} is of another model ({differs[0]}): leave"
        f" model= out to run the file's, or take its sections model and trainer out to run {typed}"
    )


# Keys that only exported models have.
OFFLINE_ONLY = ("infer.", "model.model_config.is_sample_acceleration")
ASCEND_ONLY = tuple(f"context.{key}" for key in ASCEND_KEYS)
MINDFORMERS_LOGS = "output/msrun_log"  # of the ranks that msrun starts
# Paths of the graphs that run_mode=export of run_mindformer writes.
MINDFORMERS_EXPORT = {
    "prefill_model_path": "mindir_full_checkpoint",
    "increment_model_path": "mindir_inc_checkpoint",
}
# Keys that a typed option of a group sets: these, and those that differ from the default option.
# Others are defaults, which a file overrides.
_SET_BY_OPTION: Mapping[str, Collection[str]] = {
    "parallel": (
        *("use_parallel", "parallel.parallel_mode", "parallel_config.data_parallel"),
        *("parallel_config.model_parallel", "parallel_config.pipeline_stage"),
    ),
    "ge": ("infer.ge_preset", "infer.ge_options"),
    "backend": ("backend",),
}
_OF_A_MODEL = ("model.", "trainer.", "processor.")  # defaults too
_SETTINGS = "model.model_config"
# Keys, and those that take precedence over them: if only the first is typed, a file's others
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
    **dict.fromkeys(SAMPLING, ("do_sample",)),
    f"{_SETTINGS}.checkpoint_name_or_path": ("load_checkpoint",),
    "infer.model_dir": tuple(f"infer.{name}" for name in MINDFORMERS_EXPORT),
    "infer.prefill_model_path": ("infer.model_dir",),
    "export_output": tuple(f"infer.{name}" for name in MINDFORMERS_EXPORT),
}


def overlay_file(composed: Composed, line: CommandLine, file: ConfigFile) -> ConfigFile:
    """Merge a yaml of MindFormers or of an earlier run; errors are collected. Returns the file with
    the values that it refers to."""
    file = _with_values(composed, line, file)
    if any("model" in error.keys for error in composed.errors):
        return file
    if other := _other_model(composed, line, file):
        composed.fail("model", other)
    elif composed.schemas.is_of_a_run(file.raw):
        typed = _set_by_options(line, composed)
        if line.values("model"):  # a former run's is another one
            typed |= values_of("model", composed.choices["model"], composed.folders).keys()
        composed.run_again(file.raw, typed)
    else:
        _overlay_mindformers(composed, line, file)
    return file


def _with_values(composed: Composed, line: CommandLine, file: ConfigFile) -> ConfigFile:
    """The file with the values of other keys that it refers to: typed, its own, or of the groups;
    errors are collected."""
    typed = {setting.key: setting.value for setting in line.settings}
    by_options = _set_by_options(line, composed)
    known = leaves(composed.schema, composed.raw)

    def find(key: str) -> Any:
        text = typed.get(key)
        if isinstance(text, str) and key in known:
            return value_of(text, known[key])
        for raw in (composed.raw,) if key in by_options else (file.raw, composed.raw):
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
    sized = any(at(file.raw, f"{key}.hidden_size") for key in ("model", "model.model_config"))
    if (arch, chosen, sized) == (None, "auto", True):
        return (
            f"model.arch.type: missing (in {file.source}): a file of training, with sizes in"
            " Hugging Face's names and no network; pretrained_model_dir=FOLDER predicts without it"
        )
    if arch in (None, chosen):
        models = options_of("model", composed.folders)
        return blended(line.settings, file, composed.raw, models)
    if arch not in (*networks(), "auto"):
        there = ", ".join(sorted(networks()))
        return (
            f"model.arch.type: {arch} is not supported (in {file.source}); expected one of {there}"
        )
    text = f"model.arch.type: got {show(arch)} (in {file.source}), but the model chosen is {chosen}"
    return text + ("; leave model= out to run the file's" if line.values("model") else "")


def _overlay_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Translate a MindFormers yaml to our keys; keys without effect are listed in a note."""
    where, models = f" (in {file.source})", options_of("model", composed.folders)
    if composed.raw.get("run_mode") == "finetune":
        from lite_runner.config.mindformers_training import with_training

        has_data = bool(line.values("finetune.data"))
        trained, notes, wrong = with_training(file.raw, has_data=has_data)
        file = replace(file, raw=trained)
        composed.notes += [Note(text + where) for text in notes]
        for text in wrong:
            composed.fail(text.partition(":")[0], text + where)
    elif composed.raw.get("run_mode") == "eval":
        from lite_runner.config.mindformers_training import with_evaluation

        translated, notes = with_evaluation(file.raw)
        file = replace(file, raw=translated)
        composed.notes += [Note(text + where) for text in notes]
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
    typed = {setting.key for setting in line.settings} | _set_by_options(line, composed)
    backend = composed.choices.get("backend", "native")  # online, where none is named
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
    if "use_parallel" in _set_by_options(line, composed):
        return bool(composed.raw["use_parallel"])
    return bool(file.raw.get("use_parallel", composed.raw.get("use_parallel")))


def _ignored(keys: Collection[str], source: str) -> Note:
    count = len(set(keys))
    which = "1 key" if count == 1 else f"{count} keys"
    has = "has" if count == 1 else "have"
    return Note(
        f"{which} of {source} {has} no effect here (listed in run.log, and with verbosity=2)",
        f"no effect here, of {source}: {format_keys(keys)}",
    )


def _set_by_options(line: CommandLine, composed: Composed) -> set[str]:
    """The dotted keys that the typed options of groups stand for."""
    usual_options = options_named_in(conf_dir() / "config.yaml")
    keys: set[str] = set()
    for group in {s.key for s in line.settings if s.key in GROUPS and not s.prefix}:
        option = composed.choices.get(group)
        if option is not None and group != "run_mode":  # only defaults
            usual = values_of(group, usual_options[group])
            keys.update(_SET_BY_OPTION.get(group, ()))
            keys |= {
                key
                for key, value in values_of(group, option, composed.folders).items()
                if value not in (None, "", usual.get(key)) and not key.startswith(_OF_A_MODEL)
            }
    for group, option in composed.own.items():
        keys |= values_of(group, option, composed.folders).keys()
    return keys


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


def do_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
    """Apply run_mindformer's behaviour where keys are not given: see below."""
    _export_as_mindformers(composed, line, file)
    if line.mindformer:
        _run_as_mindformers(composed, line, file)


def _export_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
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


def _run_as_mindformers(composed: Composed, line: CommandLine, file: ConfigFile) -> None:
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


def _leave_out(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """Remove keys typed as ~key from a file; others stay, to be refused."""
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
