"""The adapters that a config names, and the one that is merged into the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.options import AdapterOptions
from lite_runner.config.requests import adapter_names
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.files import ModelFiles
from lite_runner.weights.checkpoint import open_with_lora
from lite_runner.weights.lora.adapter import Adapter
from lite_runner.weights.lora.adapter_config import lora_settings
from lite_runner.weights.lora.adapter_reader import fitted, open_adapters
from lite_runner.weights.lora.merge import merged_model


def adapters_of(
    config: AdapterOptions, model: Decoder, names: Sequence[str] | None = None
) -> dict[str, Adapter]:
    """The adapters of adapter_path with these `names`; without `names` those of adapter_id, or all
    where it is null. Raises ArtifactError."""
    if names is None and config.adapter_id is not None:
        names = adapter_names(config.adapter_id)
    path = Path(config.adapter_path).expanduser()
    return open_adapters(path, model, names, root=adapter_root_of(config))


def adapter_root_of(config: AdapterOptions) -> Path | None:
    """The folder that adapters must lie in; None: anywhere."""
    return Path(config.adapter_root).expanduser() if config.adapter_root else None


def with_adapter(files: ModelFiles, config: AdapterOptions) -> ModelFiles:
    """The model with the adapter of adapter_path merged into it, if the config names one.

    Raises ConfigError where adapter_path has several and adapter_id names none of them,
    ArtifactError where the adapter does not fit the model.
    """
    if not config.adapter_path or files.adapter is not None:
        return files
    adapters = adapters_of(config, files.model)
    if len(adapters) != 1:
        raise ConfigError(
            f"adapter_path={config.adapter_path} lists {len(adapters)} adapters, one can be merged",
            f"adapter_id={next(iter(adapters))}",
        )
    (adapter,) = adapters.values()
    return _merged(files, adapter)


def with_pet_lora(files: ModelFiles, config: RunConfig) -> ModelFiles:
    """With pet_type=lora, the adapter merged: that of adapter_path, or the checkpoint's own.

    Raises ArtifactError where there is none, or it does not fit the model.
    """
    pet, path = config.model.model_config.pet_config, files.path
    if pet is None:
        return files
    if isinstance(config, AdapterOptions) and config.adapter_path:
        return with_adapter(files, config)
    assert path is not None  # random weights have no LoRA: config/checks.py
    _, lora = open_with_lora(path, files.model)
    if not lora:
        raise ArtifactError(
            f"{path}: pet_config.pet_type=lora, but the checkpoint holds no LoRA weights (names "
            "that end in lora_a and lora_b)",
            "adapter_path= the adapter's folder, or leave pet_config out for the base model",
        )
    settings = lora_settings(path, pet.lora_rank, pet.lora_alpha, pet.target_modules)
    adapter = fitted("lora", path, lora, path, settings, files.model)
    return _merged(files, adapter)


def _merged(files: ModelFiles, adapter: Adapter) -> ModelFiles:
    model = merged_model(files.model, adapter)
    return dataclasses.replace(files, model=model, base=files.model, adapter=adapter)
