"""Which option of each group a run has: typed, named in a file, or meant by a checkpoint."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.config_file import ConfigFile, names_model
from lite_runner.config.fields import Fault, fault, hints_of, show
from lite_runner.config.grammar import value_of
from lite_runner.config.groups import GROUPS, options_of, twice_defined, user_folder
from lite_runner.config.mindformers import arch_of, base_model
from lite_runner.config.other_tools import CHECKPOINTS, command_meant
from lite_runner.config.sections import (
    ChatGLM2Settings,
    GLMSettings,
    LayerNormSettings,
    MixtureSettings,
    RotaryLayerNormSettings,
    Settings,
)
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.config.yaml_file import at
from lite_runner.errors import ConfigError

SEARCHPATH = "hydra.searchpath"
RANDOM = "random"  # of load_checkpoint
_TRAINING = ("train", "finetune")  # run modes of run_mindformer
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")  # on the hub
# Of model_config, what says which model it is; how far its context goes may be chosen.
_OF_THE_MODEL = sorted(
    set()
    .union(*map(hints_of, (MixtureSettings, ChatGLM2Settings, LayerNormSettings, GLMSettings)))
    .union(hints_of(RotaryLayerNormSettings))
    - {*hints_of(Settings), "seq_length", "type"}
)


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
) -> tuple[CommandLine, list[Fault]]:
    """A line whose model is a checkpoint (`model=PATH`, or `load_checkpoint=PATH` alone) as one
    with model=auto, which takes the sizes from there."""
    typed = _last(line, "model")
    if typed is None:
        return _of_checkpoint_alone(line, file, models), []
    if typed in models or not ("://" in typed or is_there(typed)):
        return line, []
    weights = _last(line, "load_checkpoint")
    faults = []
    if names_model(file.raw, models):
        faults = [
            f"model: got {typed}, but {file.source} has a model of its own;"
            f" load_checkpoint={typed} runs that model on these weights"
        ]
    elif weights not in (None, "", typed):
        faults = [
            f"model: got {typed}, and load_checkpoint={weights} besides: give one of them"
            f" (pretrained_model_dir={typed} takes only sizes and tokenizer from a folder)"
        ]
    settings = [s for s in line.settings if s.key != "model" or s.prefix]
    settings += [Setting("model", "auto"), Setting("load_checkpoint", typed)]
    return dataclasses.replace(line, settings=settings), [fault("model", text) for text in faults]


def _of_checkpoint_alone(
    line: CommandLine, file: ConfigFile, models: Collection[str]
) -> CommandLine:
    weights = _last(line, "load_checkpoint") or str(at(file.raw, "load_checkpoint") or "")
    named = "model" in file.choices or names_model(file.raw, models)
    if named or weights in ("", RANDOM) or _last(line, "pretrained_model_dir"):
        return line
    # A model's name as load_checkpoint is MindFormers' way to say: its usual weights.
    model = weights if weights in models and not is_there(weights) else "auto"
    return dataclasses.replace(line, settings=[Setting("model", model), *line.settings])


def bare_words(line: CommandLine, models: Collection[str]) -> str:
    """The fault of words without a key, with the command line they may stand for."""
    typed = [s.value for s in line.settings if s.key == "predict_data"]
    prompt = typed[-1] if typed and isinstance(typed[-1], str) else None
    meant = command_meant(line.bare, prompt, models, options_of("run_mode"))
    alone = "" if line.settings or line.config_files else "run_lite.py "
    words = ", ".join(show(word) for word in line.bare)
    return f"{words}: expected key=value; did you mean: {alone}{meant}"


def _last(line: CommandLine, key: str) -> str | None:
    values = [s.value for s in line.settings if s.key == key and not (s.prefix and key in GROUPS)]
    return values[-1] if values and isinstance(values[-1], str) else None


def is_there(path: str) -> bool:
    """Whether a file or folder is there; no text is an error."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False


def options_chosen(
    settings: Sequence[Setting], file: ConfigFile, folders: Sequence[Path], faults: list[Fault]
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
                faults.append(fault(group, f"{group}={name} is in {both}: rename yours"))
        else:
            near = nearest(name.replace("-", "_"), options, cutoff=0.5)
            text = f"{group}: got {show(name)}{origin}, expected one of {', '.join(options)}"
            if group == "run_mode" and name in _TRAINING:
                near, text = None, f"{text}: nothing is trained here, and predict runs the model"
            elif group == "model" and (looked_for := _looked_for(name)):
                near, text = None, looked_for
            # Which options there are depends on the run mode: prompts are not asked for then.
            keys = (group, "predict_data") if group == "run_mode" else (group,)
            faults.append(Fault(keys, text + did_you_mean(near)))
            if near:  # so that the keys of the model that was meant are known
                choices[group] = near
    return choices


def _looked_for(name: str) -> str:
    """What is wrong with a path as the model; "" for what is not meant as one."""
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
    """Why a file and a typed model= are of two models, of which a run would be a mixture; "" where
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
    for key in _OF_THE_MODEL:
        value = at(file.raw, f"model.model_config.{key}")
        if None not in (value, own.get(key)) and value != own[key]:
            differs.append(f"{key} {show(value)}, not {show(own[key])}")
    if not differs:
        return ""
    return (
        f"model: got {typed}, but {file.source} is of another model ({differs[0]}): leave"
        f" model= out to run the file's, or take its sections model and trainer out to run {typed}"
    )
