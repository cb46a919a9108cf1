"""AutoConfig: the settings of a model as attributes, over the same config as the command line."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.api.context import chosen
from lite_runner.api.ranks import TransformerOpParallelConfig, divided, parallel_settings
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.fields import Fault, hints_of, leaves, raise_faults, read
from lite_runner.config.groups import options_of
from lite_runner.config.mindformers import translate
from lite_runner.config.mindformers_keys import IGNORED
from lite_runner.config.model_dir import only_yaml
from lite_runner.config.options import GenerateOptions
from lite_runner.config.sections import Context
from lite_runner.config.suggest import did_you_mean, nearest, nearest_key
from lite_runner.config.yaml_file import put_at
from lite_runner.errors import ConfigError
from lite_runner.run_modes import faults, predict, resolve

_SECTION = "model.model_config."
_WEIGHTS = "checkpoint_name_or_path"
_MEANT_BESIDES = ("type", "hidden_size", "seq_length", "theta")  # by other settings of MindFormers
_LATER = "prompts are given to the model"  # a run's config wants some
# Keys of a run that say what to do, not what with.
OF_A_RUN = frozenset(
    """
    convert_format convert_output dry_run eval_data eval_stride eval_window export_output merge
    model only_save_strategy overwrite predict_data quantize_output run_mode shard_format
    shard_output stream system output_format trainer transform_process_num transform_rank verbosity
    """.split()
)


class PretrainedConfig:
    """Settings of one model; every key of conf/model's `model_config` is an attribute, and so are
    those of the command line that do not say what to do with it: quant, kv_cache, adapter_path,
    threads, load_checkpoint, ...

    `batch_size` says how many sequences to hold room for from the start; more are taken too.
    What of MindFormers' settings concerns training only is kept, and changes nothing.
    Setting an attribute that does not exist, or to a value it cannot have, is a ConfigError.
    """

    def __init__(self, config: GenerateOptions) -> None:
        object.__setattr__(self, "_raw", config.to_dict())
        object.__setattr__(self, "_more", {"batch_size": 1})  # kept, of no effect on the run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, before there is anything
            raise AttributeError(name)
        if name == "parallel_config":
            return TransformerOpParallelConfig(**self._raw[name])
        settings = self._raw["model"]["model_config"]
        for place in (self._more, settings, self._raw, self._raw["context"]):
            if name in place and name not in OF_A_RUN:
                return place[name]
        near = did_you_mean(nearest_key(name, [*settings, *self._more, *_keywords(self._raw)]))
        raise AttributeError(f"{self._raw['trainer']['model_name']} has no setting {name!r}{near}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, settings: Mapping[str, Any]) -> None:
        """Set several at once: some of MindFormers' have a meaning only together."""
        if not settings.get(_WEIGHTS, "its own"):  # as in MindFormers: what is loaded comes later
            settings = {**settings, _WEIGHTS: "random"}
        if "parallel_config" in settings:
            settings = dict(settings)
            self._raw["parallel_config"] = parallel_settings(settings.pop("parallel_config"))
        known = leaves(predict.Config, self._raw)
        placed = self._placed(settings)
        found = translate(
            placed,
            known.keys() - (IGNORED - self._raw.keys()),
            options_of("model"),
            defaults=self._raw["model"]["model_config"],
            use_parallel=False,
            sized=True,
        )
        faults = [Fault((), self._told(text)) for text in found.faults]
        taken: dict[str, Any] = {}
        for key, given in found.assignments.items():
            value = read(given, known[key], key, faults)
            taken[key] = given if dataclasses.is_dataclass(value) else value
        if faults:
            raise ConfigError.of([fault.text.replace(_SECTION, "") for fault in faults])
        # What has another name here is kept under its own too.
        others = {key.removeprefix(_SECTION) for key in found.ignored} | {"pet_config"}
        more = {name: value for name, value in settings.items() if name in others}
        if "batch_size" in more:
            read_count(more["batch_size"])
        self._more.update(more)
        for key, value in taken.items():
            put_at(self._raw, key, value)
        # The model's own default must not forbid a shorter context.
        length = f"{_SECTION}seq_length"
        shortened = length in taken and f"{_SECTION}max_decode_length" not in taken
        own = self._raw["model"]["model_config"]
        if shortened and own["max_decode_length"]:
            own["max_decode_length"] = min(own["max_decode_length"], own["seq_length"])

    def _placed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """`settings` in the sections of a run's yaml. Raises ConfigError for those of a run."""
        own, context = self._raw["model"]["model_config"], hints_of(Context)
        top, sections = _keywords(self._raw), _sections(self._raw)
        section = {name: own[name] for name in _MEANT_BESIDES if name in own}
        raw: dict[str, Any] = {"model": {"model_config": section}}
        for name, value in settings.items():
            if name in OF_A_RUN:
                raise ConfigError(f"{name}: no setting of a model, but of what is done with it")
            if name in top or (name in sections and isinstance(value, Mapping)):
                raw[name] = value
            elif name in context and name not in own:
                raw.setdefault("context", {})[name] = value
            else:
                section[name] = _plain(value)
        return raw

    def _told(self, fault: str) -> str:
        """A fault of an unknown key, with what may be meant among all that are settings here."""
        name, missing, _ = fault.removeprefix(_SECTION).partition(": no such key")
        if not missing:
            return fault
        known = [*self._raw["model"]["model_config"], *_keywords(self._raw), *hints_of(Context)]
        return f"{name}: no such key{did_you_mean(nearest(name, known))}"

    def __repr__(self) -> str:
        settings = {**self._raw["model"]["model_config"], **self._more}
        return "\n".join(f"{name}: {value}" for name, value in settings.items())

    def copy(self) -> PretrainedConfig:
        """The same settings, apart from these."""
        return copy.deepcopy(self)

    def run_config(self, options: Mapping[str, Any] | None = None) -> GenerateOptions:
        """These settings, the chosen device and `options` (top-level keys) as a checked config.

        Raises ConfigError with all that is wrong.
        """
        raw = {**self._raw, **(options or {})}
        raw["context"] = {**raw["context"], **chosen()}
        config = predict.Config.from_dict(divided(raw))
        raise_faults(list(faults(config)))
        return config


class AutoConfig:
    """Makes configs; has no objects of its own."""

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path | Mapping[str, Any], **settings: Any
    ) -> PretrainedConfig:
        """The config of a model of conf/model, a yaml file or what it holds, a folder or a
        checkpoint.

        `settings` are set on it. Raises ConfigError for an unknown name, with what it may mean.
        """
        source = name_or_dir if isinstance(name_or_dir, Mapping) else str(name_or_dir)
        config = PretrainedConfig(settings_of(source))
        config.update(settings)
        return config


def settings_of(source: str | Mapping[str, Any], **keys: str | list[str]) -> GenerateOptions:
    """The run that a model's name, yaml (or what it holds), folder or checkpoint means; `keys` are
    set besides."""
    settings: dict[str, str | list[str]] = {
        "run_mode": "predict",
        "use_parallel": "false",
        **keys,
    }
    if isinstance(source, Mapping):
        return _resolved(settings, held=_plain(source))
    path = Path(source).expanduser()
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
    return _resolved(settings, file)


def _resolved(
    settings: Mapping[str, str | list[str]],
    file: str | None = None,
    held: Mapping[str, Any] | None = None,
) -> GenerateOptions:
    given = [Setting(key, value) for key, value in settings.items()]
    given.append(Setting("predict_data", [_LATER]))
    config, notes = resolve(
        CommandLine(settings=given, config_files=[file] if file else [], config=held)
    )
    assert isinstance(config, GenerateOptions)
    for note in notes:
        progress.note(note.detail or note.text)
    return config


def _keywords(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a run's config that are settings of its model, too."""
    own = raw["model"]["model_config"]
    apart = {*_sections(raw), *OF_A_RUN, *own}
    return [name for name in hints_of(predict.Config) if name in raw and name not in apart]


def _sections(raw: Mapping[str, Any]) -> list[str]:
    return [name for name, value in raw.items() if isinstance(value, Mapping)]


def _plain(value: Any) -> Any:
    """An object of MindFormers' for a section (a PetConfig) as the mapping it stands for."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def read_count(value: Any) -> int:
    """A batch size. Raises ConfigError unless it is an integer above 0."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"batch_size: got {value!r}, expected an integer >= 1")
    return value


class _SizedConfig(PretrainedConfig):
    """The config of a family's model of given sizes; the other settings are those of `_base`.

    `checkpoint_name_or_path` may be the name of a model, whose weights it then has; without one
    the weights are random, as in MindFormers.
    """

    _base: str

    def __init__(self, **settings: Any) -> None:
        source = settings.setdefault(_WEIGHTS, None)
        base = str(source) if source in options_of("model") else self._base
        super().__init__(settings_of(base))
        self.update(settings)

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **settings: Any) -> PretrainedConfig:
        """As AutoConfig.from_pretrained."""
        return AutoConfig.from_pretrained(name_or_dir, **settings)


class BloomConfig(_SizedConfig):
    """A BLOOM's; what is not given is as in bloom_560m."""

    _base = "bloom_560m"


class GPT2Config(_SizedConfig):
    """A GPT-2's; what is not given is as in gpt2."""

    _base = "gpt2"


class LlamaConfig(_SizedConfig):
    """A Llama's; what is not given is as in llama2_7b.

    The width of the feed-forward layer follows from hidden_size, multiple_of and
    ffn_dim_multiplier, unless intermediate_size gives it.
    """

    _base = "llama2_7b"

    def __init__(self, **settings: Any) -> None:
        if "hidden_size" in settings and settings.get("intermediate_size") is None:
            settings.setdefault("multiple_of", 256)
        super().__init__(**settings)


class Qwen2Config(LlamaConfig):
    """A Qwen2's, which MindFormers writes as a Llama with qkv_has_bias; otherwise as qwen2_7b."""

    _base = "qwen2_7b"
