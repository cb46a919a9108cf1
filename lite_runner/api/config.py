"""AutoConfig: the settings of a model as attributes, over the same config as the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from lite_runner.api.context import chosen
from lite_runner.api.model_source import resolve_source
from lite_runner.api.parallel_config import TransformerOpParallelConfig, parallel_settings
from lite_runner.api.ranks import of_these_ranks
from lite_runner.api.settings import RUN_KEYS, WEIGHTS, assign, top_level_keys
from lite_runner.config.fields import raise_faults
from lite_runner.config.options import ComputeOptions, GenerateOptions
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.run_modes import export, faults, predict

C = TypeVar("C", bound=ComputeOptions)


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
        object.__setattr__(self, "_more", {"batch_size": 1})  # kept, of no effect on the run

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
        if not settings.get(WEIGHTS, "its own"):  # as in MindFormers: what is loaded comes later
            settings[WEIGHTS] = "random"
        if "parallel_config" in settings:
            self._raw["parallel_config"] = parallel_settings(settings.pop("parallel_config"))
        self._more.update(assign(self._raw, settings))

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
        return self._validated(predict.Config, options or {})

    def export_config(self, options: Mapping[str, Any]) -> export.Config:
        """The same for run_mode=export; `options` give its own keys."""
        return self._validated(export.Config, {"run_mode": "export", **options})

    def _validated(self, kind: type[C], options: Mapping[str, Any]) -> C:
        raw = of_these_ranks(self._raw)
        raw["context"] = {**raw["context"], **chosen()}
        own = {field.name: raw[field.name] for field in fields(kind) if field.name in raw}
        config = kind.from_dict({**own, **options})
        raise_faults(list(faults(config)))
        return config


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
    keys = {"load_checkpoint": str(checkpoint)} if checkpoint else {}
    config = PretrainedConfig(resolve_source(source, **keys))
    config.update(settings)
    return config
