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
from lite_runner.config.model_dir import only_yaml
from lite_runner.config.schema import RunConfig
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.errors import ConfigError

_SECTION = "model.model_config."
_MEANT_BESIDES = ("type", "hidden_size", "seq_length", "theta")  # by other settings of MindFormers
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
        self.update({name: value})

    def update(self, settings: Mapping[str, Any]) -> None:
        """Set several at once: some of MindFormers' have a meaning only together."""
        known = leaves(RunConfig, self._raw)
        own = self._raw["model"]["model_config"]
        context = {name: own[name] for name in _MEANT_BESIDES if name in own}
        raw = {"model": {"model_config": {**context, **settings}}}
        found = translate(raw, known, options_of("model"), use_parallel=False, sized=True)
        faults = [Fault((), text) for text in found.faults]
        taken = {}
        for key, given in found.assignments.items():
            taken[key.removeprefix(_SECTION)] = read(given, known[key], key, faults)
        if faults:
            raise ConfigError.of([fault.text.replace(_SECTION, "") for fault in faults])
        ignored = {key.removeprefix(_SECTION) for key in found.ignored}
        more = {name: value for name, value in settings.items() if name in ignored}
        if "batch_size" in more:
            read_count(more["batch_size"])
        self._more.update(more)
        own.update(taken)
        # The model's own default must not forbid a shorter context.
        if "seq_length" in taken and "max_decode_length" not in taken and own["max_decode_length"]:
            own["max_decode_length"] = min(own["max_decode_length"], own["seq_length"])

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
        config.update(settings)
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
        if found := only_yaml(path):
            file = str(found)
        else:
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


def read_count(value: Any) -> int:
    """A batch size. Raises ConfigError unless it is an integer above 0."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"batch_size: got {value!r}, expected an integer >= 1")
    return value


def BloomConfig(**settings: Any) -> PretrainedConfig:
    """The config of a BLOOM of given sizes; the other settings are those of bloom_560m.

    `checkpoint_name_or_path` may be the name of a model, whose weights it then has; without one
    the weights are random, as in MindFormers.
    """
    return _config_of("bloom_560m", settings)


def LlamaConfig(**settings: Any) -> PretrainedConfig:
    """The config of a Llama of given sizes; the other settings are those of llama2_7b.

    See BloomConfig. The width of the feed-forward layer follows from hidden_size, multiple_of and
    ffn_dim_multiplier, unless intermediate_size gives it.
    """
    if "hidden_size" in settings and settings.get("intermediate_size") is None:
        settings.setdefault("multiple_of", 256)
    return _config_of("llama2_7b", settings)


def _config_of(base: str, settings: dict[str, Any]) -> PretrainedConfig:
    source = settings.get("checkpoint_name_or_path")
    if source in options_of("model"):
        base = str(source)
    elif not source:
        settings["checkpoint_name_or_path"] = "random"
    return AutoConfig.from_pretrained(base, **settings)
