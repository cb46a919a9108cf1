"""AutoConfig and MindFormers' config classes: a model's settings as attributes of a run config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lite_runner.api.context import chosen, of_these_ranks
from lite_runner.api.settings import RUN_KEYS, WEIGHTS, assign, resolve_source, top_level_keys
from lite_runner.config import (
    Invalid,
    did_you_mean,
    nearest,
    nearest_key,
    put_at,
    raise_errors,
    read,
)
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.checks import with_backend
from lite_runner.config.generation import decided
from lite_runner.config.groups import options_of, own_source, values_of
from lite_runner.config.mindformers import IGNORED
from lite_runner.config.schema import Exported, GenerateOptions
from lite_runner.config.sections import RANDOM, ParallelConfig
from lite_runner.errors import ConfigError
from lite_runner.run_modes import errors, export, finetune, predict, resolve
from lite_runner.run_modes import eval as eval_mode
from lite_runner.text import holds_tokenizer
from lite_runner.weights.checkpoint import config_folder
from lite_runner.weights.source import is_on_hub


class AutoConfig:
    """Makes configs; has no objects of its own."""

    @classmethod
    def from_pretrained(
        cls, name_or_dir: str | Path | Mapping[str, Any], **settings: Any
    ) -> PretrainedConfig:
        """The config of a model of conf/model, a yaml file or its content, a folder or a
        checkpoint.

        `settings` are set on it. Raises ConfigError for an unknown name, with the nearest ones.
        """
        return config_of(name_or_dir, settings)


def config_of(
    name_or_dir: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any],
    checkpoint: str | Path = "",
) -> PretrainedConfig:
    """As AutoConfig.from_pretrained; `checkpoint`: weights to take in place of the model's own."""
    source = name_or_dir if isinstance(name_or_dir, Mapping) else str(name_or_dir)
    config = PretrainedConfig(resolve_source(source))
    given = decided(settings)
    config.update({WEIGHTS: str(checkpoint), **given} if checkpoint else given)
    return config


class PretrainedConfig:
    """Settings of one model; every key of conf/model's `model_config` is an attribute, and so are
    those of the command line that do not say what to do with it: quant, kv_cache, adapter_path,
    threads, load_checkpoint, ...

    `batch_size`: how many sequences to allocate the KV cache for from the start; it grows when a
    call has more. MindFormers' settings of training are kept, and change nothing.
    Setting an attribute that does not exist, or to a value it cannot have, is a ConfigError.
    """

    def __init__(self, config: GenerateOptions) -> None:
        object.__setattr__(self, "_raw", config.to_dict())
        object.__setattr__(self, "_more", {"batch_size": 1})  # kept, but without effect on the run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by copy and pickle, before there is anything
            raise AttributeError(name)
        if name == "parallel_config":
            return TransformerOpParallelConfig(**self._raw[name])
        settings = self._raw["model"]["model_config"]
        for place in (self._more, settings, self._raw, self._raw["context"]):
            if name in place and name not in RUN_KEYS:
                return place[name]
        near = did_you_mean(nearest_key(name, [*settings, *self._more, *top_level_keys(self._raw)]))
        raise AttributeError(f"{self._raw['trainer']['model_name']} has no setting {name!r}{near}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, settings: Mapping[str, Any]) -> None:
        """Set several at once: some of MindFormers' have a meaning only together."""
        settings = dict(settings)
        if WEIGHTS in settings:
            # No value, as in MindFormers: it is set on loading.
            settings[WEIGHTS] = str(settings[WEIGHTS] or RANDOM)
            settings = {**self._in_place_of_loaded(settings[WEIGHTS]), **settings}
        if "parallel_config" in settings:
            self._raw["parallel_config"] = parallel_settings(settings.pop("parallel_config"))
        self._more.update(assign(self._raw, settings))

    def _in_place_of_loaded(self, source: str) -> dict[str, str]:
        """The keys by which `source` is read in place of what load_checkpoint or
        pretrained_model_dir names, whose sizes and tokenizer stay."""
        former, folder = self._raw["load_checkpoint"], self._raw["pretrained_model_dir"]
        if not former and not folder:
            return {}
        keys = {"load_checkpoint": own_source(source) or source}
        if not folder and (beside := self._described_by(former)):
            keys["pretrained_model_dir"] = beside
        return keys

    def _described_by(self, checkpoint: str) -> str:
        """The folder that has the tokenizer of a checkpoint, and the sizes of model=auto; "" for
        none."""
        sizes = self._raw["model"]["model_config"]["type"] == "auto"
        if "://" in checkpoint:
            return checkpoint if sizes and is_on_hub(checkpoint) else ""
        folder = config_folder(Path(checkpoint).expanduser())
        found = (folder / "config.json").is_file() if sizes else holds_tokenizer(folder)
        return str(folder) if found else ""

    def __repr__(self) -> str:
        settings = {**self._raw["model"]["model_config"], **self._more}
        return "\n".join(f"{name}: {value}" for name, value in settings.items())

    def copy(self) -> PretrainedConfig:
        """A deep copy."""
        return copy.deepcopy(self)

    def run_config(self, options: Mapping[str, Any] | None = None) -> GenerateOptions:
        """These settings, the chosen device and `options` (top-level keys) as a validated config.

        Raises ConfigError with all validation errors.
        """
        config = self._validated(predict.Config, options or {})
        if config.in_mindformers:
            raise ConfigError(
                "backend=mindformers generates in a process of its own, without a model object",
                "backend='auto'; on the command line backend=mindformers",
            )
        return config

    def export_config(self, options: Mapping[str, Any]) -> export.Config:
        """The same for run_mode=export; `options` give its own keys."""
        return self._validated(export.Config, {"run_mode": "export", **options})

    def finetune_config(self, keys: Mapping[str, str | list[str]]) -> finetune.Config:
        """The same for run_mode=finetune; `keys` are set as on the command line."""
        settings = {
            "model": "tiny_llama",
            "load_checkpoint": "random",
            "run_mode": "finetune",
            **keys,
        }
        line = CommandLine(settings=[Setting(key, value) for key, value in settings.items()])
        whole = resolve(line)[0].to_dict()
        raw = of_these_ranks(self._raw)
        raw["context"] = {**raw["context"], **chosen()}
        given = {key.partition(".")[0] for key in keys} | {"run_mode"}
        own = {name: raw[name] for name in whole if name in raw and name not in given}
        config = finetune.Config.from_dict({**whole, **own})
        raise_errors([*errors(config)])
        return config

    def eval_config(self, options: Mapping[str, Any]) -> eval_mode.Config:
        """The same for run_mode=eval; `options` give its own keys."""
        own: dict[str, Any] = {}
        for key, value in values_of("run_mode", "eval").items():
            if key.partition(".")[0] not in self._raw:
                put_at(own, key, value)
        own["eval"].update(options.get("eval", {}))
        return self._validated(
            eval_mode.Config, {**own, **options, "eval": own["eval"], "run_mode": "eval"}
        )

    def _validated(self, kind: type[Exported], options: Mapping[str, Any]) -> Exported:
        raw = of_these_ranks(self._raw)
        raw["context"] = {**raw["context"], **chosen()}
        own = {field.name: raw[field.name] for field in fields(kind) if field.name in raw}
        config = with_backend(kind.from_dict({**own, **options}))
        raise_errors(errors(config))
        return config


class TransformerOpParallelConfig(ParallelConfig):
    """Parallelism of a model: `data_parallel` replicas, each sharded over `model_parallel` ranks.

    As in MindFormers the embedding and the head are whole on every rank, unless vocab_emb_dp=False.
    Settings of training change nothing.
    """

    def __init__(self, **settings: Any) -> None:
        """Raises ConfigError for unknown settings and invalid values."""
        known = {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "vocab_emb_dp": True}
        errors: list[Invalid] = []
        for name in settings:
            if name not in known and f"parallel_config.{name}" not in IGNORED:
                near = did_you_mean(nearest(name, known))
                errors.append(Invalid((name,), f"parallel_config.{name}: no such setting{near}"))
        given = {name: settings.get(name, default) for name, default in known.items()}
        read(given, ParallelConfig, "parallel_config", errors)
        if errors:
            raise ConfigError.of([error.text for error in errors])
        super().__init__(**given)


def parallel_settings(given: Any) -> dict[str, Any]:
    """A run's section `parallel_config` from a script's object or dict. Raises ConfigError."""
    if isinstance(given, Mapping):
        given = TransformerOpParallelConfig(**given)
    if not isinstance(given, ParallelConfig):
        raise ConfigError(
            f"parallel_config: got {given!r}, expected a TransformerOpParallelConfig or a dict"
        )
    return asdict(given)


class _SizedConfig(PretrainedConfig):
    """The config of a family's model of given sizes; the other settings are those of `_base`.

    `checkpoint_name_or_path` may be the name of a model, whose weights it then has; without one
    the weights are random, as in MindFormers.
    """

    _base: str

    def __init__(self, **settings: Any) -> None:
        source = settings.setdefault(WEIGHTS, None)
        base = str(source) if source in options_of("model") else self._base
        super().__init__(resolve_source(base))
        self.update(settings)

    @classmethod
    def from_pretrained(cls, name_or_dir: str | Path, **settings: Any) -> PretrainedConfig:
        """As AutoConfig.from_pretrained."""
        return AutoConfig.from_pretrained(name_or_dir, **settings)


class BloomConfig(_SizedConfig):
    """A BLOOM's; defaults are those of bloom_560m."""

    _base = "bloom_560m"


class ChatGLM2Config(_SizedConfig):
    """A ChatGLM2's or ChatGLM3's; defaults are those of glm2_6b."""

    _base = "glm2_6b"


class GLMConfig(_SizedConfig):
    """A ChatGLM-6B's; defaults are those of glm_6b."""

    _base = "glm_6b"


class GPT2Config(_SizedConfig):
    """A GPT-2's; defaults are those of gpt2."""

    _base = "gpt2"


class LlamaConfig(_SizedConfig):
    """A Llama's; defaults are those of llama2_7b.

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
