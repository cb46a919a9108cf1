"""The yaml files of --config, and which option of each group a run has.

Files are laid over one another. Their `defaults` choose options of the groups, as in a config of
Hydra's own; `hydra.searchpath` names folders with more of them. Else an option is typed, or meant
by a checkpoint.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from lite_runner.architectures.settings import Settings
from lite_runner.config.argv import (
    CHECKPOINTS,
    SEARCHPATH,
    CommandLine,
    Setting,
    command_meant,
)
from lite_runner.config.fields import (
    MAX_DEPTH,
    Invalid,
    at,
    did_you_mean,
    hints_of,
    invalid,
    nearest,
    show,
)
from lite_runner.config.grammar import value_of, with_environment
from lite_runner.config.groups import (
    GROUPS,
    options_named_in,
    options_of,
    own_groups,
    paths_of,
    twice_defined,
    user_folder,
)
from lite_runner.config.mindformers import arch_of, base_model
from lite_runner.config.sections import RANDOM
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system.yaml_file import read_yaml

_SELF = "_self_"
OF_HYDRA = ("hydra/launcher", "hydra/sweeper")
_OF_SWEEPS = ("callbacks", "launcher", "sweep", "sweeper")  # of `hydra` in a file
# Keys by which a file says of which model it is, and sizes that tell two models apart.
_NAMES = ("model.arch.type", "model.model_config.type", "trainer.model_name")
_SIZES = ("hidden_size", "num_layers", "num_heads", "vocab_size")


@dataclass
class ConfigFile:
    """The merged yaml files of --config without `defaults` and `hydra`; empty without --config."""

    source: str = ""  # its files, for messages
    raw: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)  # group -> option
    searchpath: list[str] = field(default_factory=list)
    errors: list[Invalid] = field(default_factory=list)
    flags: frozenset[str] = frozenset()  # keys in `raw` that are of the command line
    hydra: dict[str, Any] = field(default_factory=dict)  # of --multirun, not interpolated
    hydra_choices: dict[str, str] = field(default_factory=dict)  # hydra/launcher -> option

    def fail(self, text: str) -> None:
        """Add a validation error."""
        self.errors.append(Invalid((), text))


def read_config(
    paths: Sequence[str],
    held: Mapping[str, Any] | None,
    is_literal: Callable[[Mapping[str, Any]], bool],
) -> ConfigFile:
    """The files `paths`, each laid over those before it, or what a script holds in their place.

    A file `is_literal` where nothing in it is interpolated. Raises ConfigError for one that cannot
    be read.
    """
    config = ConfigFile(" and ".join(paths) or ("the flags" if held is None else "the config"))
    files = [(path, read_yaml(Path(path))) for path in paths] or [("", dict(held or {}))]
    for path, raw in files:
        take_hydra(config, path, raw)
        if path and not is_literal(raw):
            raw = with_environment(raw, f" (in {path})", config.errors)
        _take_defaults(config, path, raw)
        if differs := _another_model(config.raw, raw):
            before = " and ".join(paths[: paths.index(path)])
            config.fail(f"--config: {path} is of another model than {before} ({differs})")
        config.raw = merged(config.raw, raw)
    return config


def merged(
    below: Mapping[str, Any], above: Mapping[str, Any], depth: int = MAX_DEPTH
) -> dict[str, Any]:
    """Nested data with the values of `above` in place of those of `below`."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        if depth and isinstance(under, Mapping) and isinstance(value, Mapping):
            value = merged(under, value, depth - 1)
        result[key] = value
    return result


def names_model(raw: Mapping[str, Any], models: Collection[str]) -> bool:
    """True if a file says of which model it is; a name of the user's own is only a name."""
    if any(at(raw, key) is not None for key in _NAMES[:2]) or at(raw, "pretrained_model_dir"):
        return True
    return at(raw, _NAMES[2]) in models


def _another_model(below: Mapping[str, Any], above: Mapping[str, Any]) -> str:
    """The first setting in which two files are of different models; "" for none."""
    if not all(any(at(raw, key) is not None for key in _NAMES) for raw in (below, above)):
        return ""
    for key in (*_NAMES, *(f"model.model_config.{name}" for name in _SIZES)):
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
                    f"defaults: {_SELF} is not the last entry{where}: what the file itself says"
                    " always goes over the options"
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
    """Move what Hydra reads of a sweep from a file's data to `config`, with its references."""
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
    """Validation errors of a file's `hydra`: a file that came from elsewhere runs no code."""
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
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # on the hub


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
    if names_model(file.raw, models):
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
    return dataclasses.replace(line, settings=settings), [invalid("model", text) for text in errors]


def _of_checkpoint_alone(
    line: CommandLine, file: ConfigFile, models: Collection[str]
) -> CommandLine:
    weights = line.last("load_checkpoint") or str(at(file.raw, "load_checkpoint") or "")
    named = "model" in file.choices or names_model(file.raw, models)
    if named or weights in ("", RANDOM) or line.last("pretrained_model_dir"):
        return line
    # A model's name as load_checkpoint is MindFormers' way to say: its usual weights.
    model = weights if weights in models and not exists(weights) else "auto"
    return dataclasses.replace(line, settings=[Setting("model", model), *line.settings])


def bare_words(line: CommandLine, models: Collection[str]) -> str:
    """The error of words without a key, with the command line they may stand for."""
    prompt = line.last("predict_data")
    meant = command_meant(line.bare, prompt, models, options_of("run_mode"))
    alone = "" if line.settings or line.config_files else "run_lite.py "
    words = ", ".join(show(word) for word in line.bare)
    return f"{words}: expected key=value; did you mean: {alone}{meant}"


def exists(path: str) -> bool:
    """True if a file or folder is there; no text is an error."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False


def without_file(paths: Sequence[str], models: Collection[str]) -> str:
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
    """A line without the options of the user's own groups (+GROUP=OPTION), which stand beside it.
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
        for path in paths_of(group, option, folders):
            if _GLOBAL not in path.read_text(encoding="utf-8"):
                errors.append(invalid(group, f"{path}: expected '{_GLOBAL}' as its first line"))
            chosen = options_named_in(path) | chosen
    settings = [Setting(group, name) for group, name in chosen.items() if group in GROUPS]
    settings += [setting for setting in line.settings if setting.key not in groups]
    return dataclasses.replace(line, settings=settings), own


def options_chosen(
    settings: Sequence[Setting], file: ConfigFile, folders: Sequence[Path], errors: list[Invalid]
) -> dict[str, str]:
    """The option of each group that is named on the command line or in the file."""
    asked = {group: (name, f" (in {file.source})") for group, name in file.choices.items()}
    base = base_model(file.raw, options_of("model", folders))
    if arch_of(file.raw) is None and any(s.key == "pretrained_model_dir" for s in settings):
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
            if group == "run_mode" and name == "train":
                near, text = None, f"{text}: no model is trained from the start, finetune goes on"
            elif group == "model" and (looked_for := _looked_for(name)):
                near, text = None, looked_for
            # Which options there are depends on the run mode: prompts are not asked for then.
            keys = (group, "predict_data") if group == "run_mode" else (group,)
            errors.append(Invalid(keys, text + did_you_mean(near)))
            if near:  # so that the keys of the model that was meant are known
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
    if typed is None or typed == base or not names_model(file.raw, models):
        return ""
    name = at(file.raw, "trainer.model_name")
    own = at(chosen, "model.model_config") or {}
    differs = [f"model_name {name}"] if name in models else []
    # What says which model it is; how far its context goes may be chosen.
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
