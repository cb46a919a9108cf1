"""Composes conf/, files and the command line into one validated `RunConfig`, or one error with all.

Hydra composes the groups; the files of --config (config_file.py) and the settings are merged over
its result and validated against the dataclasses: no key is added, and no text of a command line is
interpolated. The config that a run keeps in its folder, given again as --config, repeats it from
any folder.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from lite_runner.config import (
    MISSING,
    Invalid,
    Note,
    accepts,
    annotation_of,
    at,
    describe,
    did_you_mean,
    free_mapping,
    hints_of,
    invalid,
    is_name,
    leaves,
    nearest,
    nearest_key,
    paths_of,
    put_at,
    raise_errors,
    read,
    show,
)
from lite_runner.config.argv import (
    CHECKPOINTS,
    SEARCHPATH,
    CommandLine,
    ConfigFile,
    Setting,
    command_meant,
    equivalent_of,
    value_of,
)
from lite_runner.config.checks import typed_errors, with_backend
from lite_runner.config.generation import without_effect
from lite_runner.config.groups import (
    GROUPS,
    compose_groups,
    downloaded_weights,
    exists,
    keys_by_run_mode,
    options_of,
    own_source,
    twice_defined,
    user_folder,
)
from lite_runner.config.prompts import is_file, prompt_file
from lite_runner.config.schema import ExportedOptions, RunConfig, SamplingOptions
from lite_runner.config.sections import RANDOM
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.yaml_file import dump_yaml

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # on the hub
ENC_KEY = "infer.enc_key"
_OF_EXPORTS = ("infer.model_dir", "infer.prefill_model_path")  # they name an exported model


@dataclass(frozen=True)
class Schemas:
    """The configs of the run modes, injected: config/ knows no run mode."""

    config_of: Callable[[str], type[RunConfig]]  # by the name of a run mode
    errors: Callable[[RunConfig], Iterator[Invalid]]  # all validation errors of a config
    notes: Callable[[RunConfig], list[str]]  # for the user, of a valid config

    def is_of_a_run(self, raw: Mapping[str, Any]) -> bool:
        """True for the config.yaml of a run, which alone has every key of its run mode."""
        mode = raw.get("run_mode")
        if not isinstance(mode, str) or mode not in options_of("run_mode"):
            return False
        # The yaml of an older run lacks newer keys: nullable ones, switches, or a section of
        # such.
        known = leaves(self.config_of(mode))
        later = {key for key, takes in known.items() if accepts(takes, NoneType) or takes is bool}
        heads = {key.partition(".")[0] for key in known.keys() - later}
        return heads - later <= raw.keys()

    @cached_property
    def keys(self) -> dict[str, frozenset[str]]:
        """The dotted keys of each run mode, without the common ones."""
        return keys_by_run_mode()

    @cached_property
    def every_key(self) -> frozenset[str]:
        """The dotted keys of all run modes, without the common ones."""
        return frozenset().union(*self.keys.values())

    @cached_property
    def heads(self) -> list[str]:
        """The first parts of all accepted keys: groups, our keys, MindFormers' keys."""
        from lite_runner.config.mindformers import IGNORED

        known = (*GROUPS, *hints_of(RunConfig), *self.every_key, *IGNORED)
        return sorted({key.partition(".")[0] for key in known})

    def run_modes_with(self, key: str) -> list[str]:
        return [mode for mode, keys in self.keys.items() if key in keys]

    def of(self, mode: Any) -> type[RunConfig]:
        """The config class of a run mode; RunConfig for a value that is not a string, which is
        reported elsewhere. Raises ConfigError for an unknown run mode."""
        if not isinstance(mode, str):
            return RunConfig
        if mode not in self.keys:
            expected = ", ".join(self.keys)
            raise ConfigError(f"conf/: run_mode: got {show(mode)}, expected one of {expected}")
        return self.config_of(mode)


@dataclass
class Composed:
    """The plain data of a run, and the validation errors so far."""

    raw: dict[str, Any]
    schemas: Schemas
    schema: type[RunConfig]  # of the run mode
    choices: dict[str, str] = field(default_factory=dict)  # group options chosen by the user
    own: dict[str, str] = field(default_factory=dict)  # options of the user's own groups
    folders: tuple[Path, ...] = ()  # of groups, besides conf/
    errors: list[Invalid] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def fail(self, key: str, text: str) -> None:
        """Add a validation error of a key."""
        self.errors.append(Invalid((key,), text))

    def set(self, setting: Setting) -> None:
        """Apply one `key=value` of the command line."""
        key, prefix = setting.key, setting.prefix
        known = leaves(self.schema, self.raw)
        annotation = annotation_of(key, known)
        if key in GROUPS:
            self.fail(key, f"{setting}: expected {key}=OPTION, without {prefix}")
        elif annotation is None:
            # Null for a key of another run mode has no effect.
            if setting.value not in ("", "null") or key not in self.others:
                self.fail(key, self._unknown(setting, list(known)))
        elif prefix == "~":
            self.fail(key, f"~{key}: a key cannot be left out; {self._unset_hint(key)}")
        elif prefix == "+":
            self.fail(key, f"{setting}: the key exists; leave out the +")
        elif isinstance(setting.value, list):
            self.assign(key, setting.value, "")
        else:
            try:
                value = value_of(setting.value, annotation)
            except ValueError as error:
                got = show(setting.value)
                self.fail(key, f"{key}: got {got}, expected {describe(annotation)} ({error})")
            else:
                self.assign(key, value, "")

    def assign(self, key: str, value: Any, where: str) -> None:
        """Set a known key, or add an error, with `where` appended, if the type is wrong."""
        known = leaves(self.schema, self.raw)
        annotation = annotation_of(key, known)
        errors: list[Invalid] = []
        parent, _, name = key.rpartition(".")
        root = free_mapping(key, known)
        section = self.section(parent) if root is None else self._section_of(root, key)
        if section is None:
            return
        if isinstance(value, str) and value == MISSING:  # as a whole: a list may hold such a prompt
            text = f"{key}: a value is missing ({MISSING} is OmegaConf's placeholder)"
            errors.append(invalid(key, text))
        else:
            read(value, annotation, key, errors)
        if errors:
            self.errors += [f._replace(text=f.text + where) for f in errors]
        elif key in ("model.arch.type", "model.model_config.type") and section.get(name) != value:
            text = f"{key}: got {show(value)}{where}, but the model chosen has {section.get(name)}"
            self.fail("model", f"{text}; another one is chosen with model=")
        else:
            section[name] = value

    def run_again(self, raw: Mapping[str, Any], typed: Collection[str]) -> None:
        """Lay the config of a former run (`raw`, of `portable`) over the groups, but for the keys
        that the typed options stand for (`typed`). What this run mode does not have of it is left
        out: the former run mode had it, and another one is typed."""
        heads = {key.partition(".")[0] for key in self.schemas.every_key}
        gone = heads - {field.name for field in fields(self.schema)}
        again = {**self.raw, **{key: value for key, value in raw.items() if key not in gone}}
        for key in leaves(self.schema):
            section, _, name = key.rpartition(".")
            former = at(again, section) if section and not section.startswith("model") else None
            if isinstance(former, Mapping) and name not in former:  # the run is older than the key
                put_at(again, key, at(self.raw, key))
        for key in leaves(self.schema).keys() & typed | {"run_mode"}:
            put_at(again, key, at(self.raw, key))
        self.raw = again

    def section(self, key: str) -> dict[str, Any]:
        """The section of a dotted key; empty if there is none."""
        section = at(self.raw, key) if key else self.raw
        return section if isinstance(section, dict) else {}

    @property
    def others(self) -> Collection[str]:
        """The dotted keys that only other run modes have."""
        return self.schemas.every_key - leaves(self.schema).keys()

    def no_effect(self, name: str, key: str) -> str:
        """The error of `name`, whose `key` only other run modes have."""
        modes = " or ".join(self.schemas.run_modes_with(key))
        mode = self.raw["run_mode"]
        return f"{name} has no effect with run_mode={mode}, only with run_mode={modes}"

    def _unknown(self, setting: Setting, known: list[str]) -> str:
        """The error of an unknown key, with a suggestion."""
        key = setting.key
        own, others = leaves(self.schema), self.others
        if any(entry.startswith(f"{key}.") for entry in own):
            return f"{setting}: a section; its keys are set one by one, as {key}.NAME=VALUE"
        parents = [key[:i] for i, letter in enumerate(key) if letter == "."]
        below = [one for one in others if one.startswith(f"{key}.")]
        if found := next((one for one in (key, *parents, *below) if one in others), None):
            return self.no_effect(key, found)
        if key in own:
            parent = key.rpartition(".")[0]
            kind = self.section(parent).get("type", "null")
            return f"{setting}: {parent} is {kind} here and has no such key"
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return f"{setting}: without --multirun only hydra.searchpath=[DIR] is used here"
        near = nearest_key(key, [*known, *others, *GROUPS])
        flag = "--" if setting.flag else ""
        elsewhere = "" if near or len(key) == 1 else equivalent_of(key)  # a letter is ambiguous
        hint = f"; here it is {elsewhere}" if elsewhere else did_you_mean(near and flag + near)
        return f"{setting}: no such key{hint}"

    def _unset_hint(self, key: str) -> str:
        *sections, name = key.split(".")
        value = self.section(".".join(sections)).get(name)
        if accepts(annotation_of(key, leaves(self.schema, self.raw)), types.NoneType):
            return f"{key}=null leaves it open"
        shown = json.dumps(value) if not isinstance(value, str) else value
        return f"without it, it is {key}={shown}"

    def _section_of(self, root: str, key: str) -> dict[str, Any] | None:
        """The mapping of `key` inside the free mapping `root`, created if missing; None, and an
        error, where the key is not possible."""
        *parents, name = key[len(root) + 1 :].split(".")
        if not all(is_name(part) for part in (*parents, name)):
            self.fail(key, f"{key}: expected names of letters, digits, _ and - between the dots")
            return None
        above, _, first = root.rpartition(".")
        section, at_key = self.section(above), above
        for part in (first, *parents):
            at_key = f"{at_key}.{part}"
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                self.fail(key, f"{key}: {at_key} is {show(section)}, not a section")
                return None
        if isinstance(section.get(name), dict):
            self.fail(key, f"{key}: a section; its keys are set one by one, as {key}.NAME=VALUE")
            return None
        return section


def resolve(line: CommandLine, schemas: Schemas) -> tuple[RunConfig, list[Note]]:
    """The run that a command line asks for, and notes for the user.

    Raises ConfigError with all validation errors: of keys, types and ranges, and of combinations.
    """
    composed = compose_line(line, schemas)
    checked: list[Invalid] = []
    config = read(composed.raw, composed.schema, "", checked)
    invalid_keys = {key for error in composed.errors for key in error.keys}
    # Consequential errors would only distract.
    errors = composed.errors + [f for f in checked if not invalid_keys.intersection(f.keys)]
    if isinstance(config, ExportedOptions):
        config = with_backend(config)
    if config is not None:
        typed = {setting.key for setting in line.settings}
        found = [*schemas.errors(config), *typed_errors(config, typed)]
        errors += [f for f in found if not invalid_keys.intersection(f.keys)]
    raise_errors(errors)
    assert config is not None
    notes = [*composed.notes, *map(Note, schemas.notes(config))]
    if isinstance(config, SamplingOptions) and (idle := without_effect(vars(config))):
        notes.append(Note(idle))
    return config, notes


def compose_line(line: CommandLine, schemas: Schemas) -> Composed:
    """Groups, file and settings merged; errors of keys and values are collected, not raised."""
    # A malformed prompt is not also reported as missing.
    early = [
        Invalid(("predict_data",) if "predict_data" in text else (), text) for text in line.errors
    ]
    file = ConfigFile("the flags")
    if line.config_files or line.config is not None:
        from lite_runner.config.config_file import read_files

        line, file = read_files(line, schemas, early)
    try:
        folders = user_folders(line, file)
    except ConfigError as error:
        early.append(Invalid(("model",), error.message))
        folders = ()
    models = options_of("model", folders)
    own: dict[str, str] = {}
    if folders:
        from lite_runner.config.config_file import with_own_groups

        line, own = with_own_groups(line, folders, early)
    if line.bare:
        early.append(Invalid(("predict_data",), bare_words(line, models)))
    started = ""
    if "train" in (line.last("run_mode"), file.raw.get("run_mode")):
        from lite_runner.config.mindformers_training import as_finetune

        line, file, started = as_finetune(line, file)
    exports = [s for s in line.settings if s.key in _OF_EXPORTS or _may_be_export(s, models)]
    if exports or "infer" in file.raw:
        from lite_runner.config.model_dir import with_export, with_model

        line, file = with_model(with_export(line, file, models), file)
    line, errors = with_checkpoint(line, file, models)
    early += errors
    if any(setting.flag for setting in line.settings):
        from lite_runner.config.config_file import move_mindformers_flags

        line, file = move_mindformers_flags(line, file)
    choices = options_chosen(line.settings, file, folders, early)
    raw = compose_groups(choices | {f"+{group}": name for group, name in own.items()}, folders)
    schema = schemas.of(raw.get("run_mode"))
    if "infer" not in {field.name for field in fields(schema)}:
        raw.pop("infer", None)  # of the group ge
    composed = Composed(raw, schemas, schema, choices, own, folders, early)
    if started:
        composed.notes.append(Note(started))
    if line.action == "run" and (file.hydra or file.hydra_choices):
        composed.notes.append(Note(f"hydra (in {file.source}) has an effect only with --multirun"))
    if "ge" in choices and "infer" not in raw:
        composed.fail("ge", composed.no_effect("ge", "infer.ge_preset"))
    if file.raw:
        from lite_runner.config.config_file import overlay_file

        file = overlay_file(composed, line, file)
    last = {setting.key: setting for setting in line.settings}
    for setting in line.settings:
        chosen = setting.key in GROUPS and not setting.prefix
        # For a key of another run mode the last value counts: it may be null.
        replaced = setting is not last[setting.key] and setting.key in composed.others
        if setting.key != SEARCHPATH and not chosen and not replaced:
            composed.set(setting)
    if file.raw or folders:
        from lite_runner.config.config_file import unset_overridden

        unset_overridden(composed, line)
    _name_weights(composed)
    if line.config_files or line.mindformer:
        from lite_runner.config.config_file import do_as_mindformers

        do_as_mindformers(composed, line, file)
    return composed


def _may_be_export(setting: Setting, models: Collection[str]) -> bool:
    """True for a model that may be a folder."""
    if setting.key != "model" or setting.prefix or setting.value in models:
        return False
    return not is_file(Path(str(setting.value)))


def _name_weights(composed: Composed) -> None:
    """Resolve a model's name in load_checkpoint, MindFormers' way to name its published weights;
    those in checkpoint_download/ are taken from there."""
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


def user_folders(line: CommandLine, file: ConfigFile) -> tuple[Path, ...]:
    """The folders of --config-dir and hydra.searchpath, each once. Raises ConfigError."""
    entries = [*line.config_dirs, *file.searchpath]
    for setting in line.settings:
        if setting.key == SEARCHPATH:
            try:
                value = value_of(str(setting.value), list[str])
            except ValueError as error:
                raise ConfigError(f"{setting}: {error}") from None
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ConfigError(f"{setting}: expected a list of folders, as {SEARCHPATH}=[DIR]")
            entries += value
    return tuple(dict.fromkeys(user_folder(entry) for entry in entries))


def with_checkpoint(
    line: CommandLine, file: ConfigFile, models: Collection[str]
) -> tuple[CommandLine, list[Invalid]]:
    """A line whose model is a checkpoint (`model=PATH`, or `load_checkpoint=PATH` alone) as one
    with model=auto, which takes the sizes from there."""
    typed = line.last("model")
    if typed is None:
        return _of_checkpoint_alone(line, file, models), []
    if typed in models or not ("://" in typed or exists(typed)):
        return line, []
    weights = line.last("load_checkpoint")
    errors = []
    if file.names_model(models):
        errors = [
            f"model: got {typed}, but {file.source} has a model of its own;"
            f" load_checkpoint={typed} runs that model on these weights"
        ]
    elif weights not in (None, "", typed):
        errors = [
            f"model: got {typed}, and load_checkpoint={weights} besides: give one of them"
            f" (pretrained_model_dir={typed} takes only sizes and tokenizer from a folder)"
        ]
    settings = [s for s in line.settings if s.key != "model" or s.prefix]
    settings += [Setting("model", "auto"), Setting("load_checkpoint", typed)]
    return replace(line, settings=settings), [invalid("model", text) for text in errors]


def _of_checkpoint_alone(
    line: CommandLine, file: ConfigFile, models: Collection[str]
) -> CommandLine:
    weights = line.last("load_checkpoint") or str(at(file.raw, "load_checkpoint") or "")
    named = "model" in file.choices or file.names_model(models)
    if named or weights in ("", RANDOM) or line.last("pretrained_model_dir"):
        return line
    # A model's name as load_checkpoint is MindFormers' way to say: its usual weights.
    model = weights if weights in models and not exists(weights) else "auto"
    return replace(line, settings=[Setting("model", model), *line.settings])


def bare_words(line: CommandLine, models: Collection[str]) -> str:
    """The error of words without a key, with the command line they may stand for."""
    prompt = line.last("predict_data")
    meant = command_meant(line.bare, prompt, models, options_of("run_mode"))
    alone = "" if line.settings or line.config_files else "run_lite.py "
    words = ", ".join(show(word) for word in line.bare)
    return f"{words}: expected key=value; did you mean: {alone}{meant}"


def options_chosen(
    settings: Sequence[Setting], file: ConfigFile, folders: Sequence[Path], errors: list[Invalid]
) -> dict[str, str]:
    """The option of each group that is named on the command line or in the file."""
    asked = {group: (name, f" (in {file.source})") for group, name in file.choices.items()}
    base, arch = None, None
    if file.raw:
        from lite_runner.config.mindformers import arch_of, base_model

        base, arch = base_model(file.raw, options_of("model", folders)), arch_of(file.raw)
    if arch is None and any(s.key == "pretrained_model_dir" for s in settings):
        base = "auto"
    if base and "model" not in asked:
        asked["model"] = (base, "")
    for group in ("run_mode", "backend"):
        if group in file.raw:
            asked[group] = (str(file.raw[group]), f" (in the file; --{group} overrides it)")
    for setting in settings:
        if setting.key in GROUPS and not setting.prefix:
            value = setting.value if isinstance(setting.value, str) else " ".join(setting.value)
            asked[setting.key] = (value, "")
    choices = {}
    for group, (name, origin) in asked.items():
        options = options_of(group, folders)
        if name in options:
            choices[group] = name
            if files := twice_defined(group, name, folders):
                both = " and in ".join(str(path) for path in files)
                errors.append(invalid(group, f"{group}={name} is in {both}: rename yours"))
        else:
            near = nearest(name.replace("-", "_"), options, cutoff=0.5)
            text = f"{group}: got {show(name)}{origin}, expected one of {', '.join(options)}"
            if group == "model" and (looked_for := _looked_for(name)):
                near, text = None, looked_for
            # The known keys depend on the run mode: a prompt is not required then.
            keys = (group, "predict_data") if group == "run_mode" else (group,)
            errors.append(Invalid(keys, text + did_you_mean(near)))
            if near:  # so that the keys of the intended model are known
                choices[group] = near
    return choices


def _looked_for(name: str) -> str:
    """The error of a path given as the model; "" for other names."""
    is_weights = name.endswith(CHECKPOINTS)
    if "/" not in name and not is_weights:
        return ""
    on_hub = _REPOSITORY.fullmatch(name) and not is_weights and not name.startswith(".")
    hint = f"; model=hf://{name} is the repository on the hub" if on_hub else ""
    return f"model: got {show(name)}, but there is no such file or folder{hint}"


def portable(config: RunConfig) -> dict[str, Any]:
    """Plain data of a config with absolute paths, valid from any folder."""
    raw = config.to_dict()
    for key, kind, value in paths_of(config):
        if isinstance(value, tuple):
            put_at(raw, key, [_absolute(path, there=not kind.written) for path in value])
        elif value:
            put_at(raw, key, _absolute(value, there=not kind.written))
    if (given := str(at(raw, ENC_KEY))).startswith("file:"):
        put_at(raw, ENC_KEY, f"file:{_absolute(given[5:])}")
    if data := vars(config).get("predict_data"):
        path = prompt_file(data)
        if path is not None and is_file(path):
            raw["predict_data"] = str(path.absolute())
    return raw


def config_yaml(config: RunConfig) -> str:
    """The text of the config.yaml that repeats a run; it holds no secrets."""
    raw = portable(config)
    if given := at(raw, ENC_KEY):
        from lite_runner.system.secret import hidden  # not for runs without

        put_at(raw, ENC_KEY, hidden(given))
    return dump_yaml(raw)


def _absolute(value: str, there: bool = False) -> str:
    """A path from the root; what is to be `there` and is not may be no path, but the name of a
    source."""
    if "://" in value or (there and value == RANDOM):  # random weights, not a folder called so
        return value
    try:
        path = Path(value).expanduser()
        return str(path.absolute()) if not there or path.exists() else value
    except (OSError, RuntimeError, ValueError):  # too long, ~name of nobody, a NUL
        return value
