"""AutoConfig: the settings of a model as attributes, over the same config as the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.api.context import chosen
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.checks import run_faults
from lite_runner.config.compose import options_of, raise_faults, resolve
from lite_runner.config.fields import Fault, leaves, read
from lite_runner.config.mindformers import translate
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.errors import ArtifactError, ConfigError

_SECTION = "model.model_config."
_LATER = "prompts are given to the model"  # a run's config wants some


class PretrainedConfig:
    """Settings of one model; every key of conf/model's `model_config` is an attribute.

    `batch_size` says how many sequences to hold room for from the start; more are taken too.
    What of MindFormers' settings concerns training only is kept, and changes nothing.
    Setting an attribute that does not exist, or to a value it cannot have, is a ConfigError.
    """

    def __init__(self, config: RunConfig) -> None:
        object.__setattr__(self, "_raw", config.to_dict())
        object.__setattr__(self, "_more", {"batch_size": 1})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, before there is anything
            raise AttributeError(name)
        settings = self._raw["model"]["model_config"]
        if name in settings:
            return settings[name]
        if name in self._more:
            return self._more[name]
        near = did_you_mean(nearest_key(name, [*settings, *self._more]))
        raise AttributeError(f"{self._raw['trainer']['model_name']} has no setting {name!r}{near}")

    def __setattr__(self, name: str, value: Any) -> None:
        known = leaves(RunConfig, self._raw)
        raw = {"model": {"model_config": {name: value}}}
        found = translate(raw, known, options_of("model"), use_parallel=False, sized=True)
        faults = [Fault((), text) for text in found.faults]
        taken = {}
        for key, given in found.assignments.items():
            taken[key.removeprefix(_SECTION)] = read(given, known[key], key, faults)
        if faults:
            raise ConfigError.of([fault.text.replace(_SECTION, "") for fault in faults])
        if name == "batch_size":
            self._more[name] = read_count(value)
        elif found.ignored:
            self._more[name] = value
        self._raw["model"]["model_config"].update(taken)

    def __repr__(self) -> str:
        settings = {**self._raw["model"]["model_config"], **self._more}
        return "\n".join(f"{name}: {value}" for name, value in settings.items())

    def copy(self) -> PretrainedConfig:
        """The same settings, apart from these."""
        return copy.deepcopy(self)

    def run_config(self, options: Mapping[str, Any] | None = None) -> RunConfig:
        """These settings, the chosen device and `options` (top-level keys) as a checked config.

        Raises ConfigError with all that is wrong.
        """
        raw = {**self._raw, **(options or {})}
        raw["context"] = {**raw["context"], **chosen()}
        config = RunConfig.from_dict(raw)
        raise_faults(list(run_faults(config)))
        return config


class AutoConfig:
    """Makes configs; has no objects of its own."""

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **settings: Any) -> PretrainedConfig:
        """The config of a model of conf/model, a yaml file, a folder or a checkpoint.

        `settings` are set on it. Raises ConfigError for an unknown name, with what it may mean.
        """
        config = PretrainedConfig(settings_of(str(name_or_dir)))
        for name, value in settings.items():
            setattr(config, name, value)
        return config


def settings_of(source: str, **keys: str) -> RunConfig:
    """The run that a model's name, yaml, folder or checkpoint means; `keys` are set besides."""
    path = Path(source).expanduser()
    settings = {"run_mode": "predict", "use_parallel": "false", **keys}
    file = None
    if source in options_of("model"):
        settings["model"] = source
    elif path.suffix in (".yaml", ".yml"):
        file = source
    elif path.is_dir():
        settings.setdefault("load_checkpoint", source)
        file = only_yaml(path)
        if file is None:
            settings["model"] = "auto"
    elif path.is_file() or "://" in source:
        settings.setdefault("load_checkpoint", source)
        settings["model"] = "auto"
    else:
        settings["model"] = source  # refused there, with what may be meant
    given = [Setting(key, value) for key, value in settings.items()]
    given.append(Setting("predict_data", [_LATER]))
    config, notes = resolve(CommandLine(settings=given, config_file=file))
    for note in notes:
        progress.note(note)
    return config


def only_yaml(folder: Path) -> str | None:
    """The yaml file of a model's folder, None where there is none. ArtifactError for several."""
    found = sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ArtifactError(
            f"{folder}: got {len(found)} yaml files ({names}), expected one",
            "keep the model's own, or give its path",
        )
    return str(found[0]) if found else None


def read_count(value: Any) -> int:
    """A batch size. Raises ConfigError unless it is an integer above 0."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"batch_size: got {value!r}, expected an integer >= 1")
    return value


def BloomConfig(**settings: Any) -> PretrainedConfig:
    """The config of a BLOOM of given sizes; the other settings are those of bloom_560m.

    `checkpoint_name_or_path` may be the name of a model, whose weights it then has.
    """
    source = settings.get("checkpoint_name_or_path")
    base = source if source in options_of("model") else "bloom_560m"
    return AutoConfig.from_pretrained(str(base), **settings)
