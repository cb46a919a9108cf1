"""Locate the model of a config: fetch it unless it is here, and read its sizes.

No weights are read, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config.options import ComputeOptions, StrategyOptions
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.consistency import (
    check_same_model,
    model_of_export,
    quantization_of,
    quantization_of_export,
)
from lite_runner.model.exported_model import ExportedModel, exported_model
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.model.merged_adapter import with_pet_lora
from lite_runner.weights.checkpoint import check_file, gguf_at, model_config_in, model_config_of
from lite_runner.weights.sharding.shard_manifest import rank_folders
from lite_runner.weights.source import fetch, held


def locate(config: RunConfig, *, weights: bool = True) -> ModelFiles:
    """Fetch what the config names, unless it is here, and read the model's sizes.

    Without `weights`, which a tokenizer does not need, those on the hub are not fetched. Raises
    ArtifactError where the model cannot be had or is not the one that the config names.
    """
    exported = exported_model(config)
    if exported is not None:
        return _exported(exported, config)
    source, model = config.checkpoint_source, _configured_model(config)
    if source == RANDOM:
        return with_pet_lora(_random(model, config), config)
    key = "pretrained_model_dir" if source == config.pretrained_model_dir else "load_checkpoint"
    path = fetch(source, progress.note, key, weights=weights)
    # A folder from the hub without weights holds no checkpoint, which is no error here.
    alone = not weights and source.startswith("hf://")
    sharded = bool(rank_folders(path))
    gguf = None if alone or sharded else gguf_at(path)
    if weights and not sharded:
        check_file(path)  # a damaged file is reported before what is missing beside it
    stored = model_config_in(path) if alone else model_config_of(path)
    if model is None:
        if stored is None:
            raise ArtifactError(
                f"{path}: holds no sizes of its model, which model=auto needs",
                "name the model, e.g. model=llama2_7b, or put its config.json beside the weights",
            )
        model = stored
    elif stored is not None:
        check_same_model(model, stored, path)
    strategy = config.src_strategy_path_or_dir if isinstance(config, StrategyOptions) else ""
    files = ModelFiles(
        source,
        path,
        model,
        config.checkpoint_seed,
        strategy=Path(strategy).expanduser() if strategy else None,
        auto_trans=isinstance(config, ComputeOptions) and config.auto_trans_ckpt,
        quantization=quantization_of(config, path, gguf),
        gguf=gguf,
    )
    return with_pet_lora(files, config) if weights else files


def locate_cached(config: RunConfig) -> ModelFiles:
    """As `locate`, but nothing is fetched: the path is None where something would be.

    Raises ArtifactError for a file that is missing from this machine, and for model=auto where the
    sizes are in what would be fetched.
    """
    source, folder = config.checkpoint_source, config.pretrained_model_dir
    if source == RANDOM or exported_model(config) is not None:
        return locate(config)
    here = held(source)
    if here is not None and (not folder or held(folder, "pretrained_model_dir") is not None):
        return locate(dataclasses.replace(config, load_checkpoint=str(here)))
    model = config.model_config()
    if model is None:
        raise ArtifactError(
            f"{source}: not in the cache, and model=auto has the model's sizes from it",
            "dry_run=true fetches nothing: name the model, or run without it once",
        )
    return ModelFiles(source, None, model, config.checkpoint_seed, quantization=config.quantization)


def locate_for_plan(config: RunConfig) -> ModelFiles:
    """The files of a run, an adapter of adapter_path not merged; with dry_run=true nothing is
    fetched. Raises ArtifactError."""
    return locate_cached(config) if config.dry_run else locate(config)


def _configured_model(config: RunConfig) -> Decoder | None:
    """The model that the config describes, or pretrained_model_dir; None: the checkpoint does.

    Raises ArtifactError where that folder has no config.json.
    """
    model, key = config.model_config(), "pretrained_model_dir"
    if model is not None or config.pretrained_model_dir in ("", config.checkpoint_source):
        return model
    folder = fetch(config.pretrained_model_dir, progress.note, key, weights=False)
    model = model_config_in(folder)
    if model is None:
        raise ArtifactError(
            f"{key}: {folder} has no config.json, which says what the model is",
            "give the folder as it comes from Hugging Face",
        )
    return model


def _random(model: Decoder | None, config: RunConfig) -> ModelFiles:
    if model is None:
        raise ConfigError(
            "model=auto takes the model's sizes from its checkpoint, and "
            "load_checkpoint=random has none",
            "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
        )
    return ModelFiles(RANDOM, None, model, config.checkpoint_seed, quantization=config.quantization)


def _exported(exported: ExportedModel, config: RunConfig) -> ModelFiles:
    """The files of an exported model, which takes the place of a checkpoint."""
    if config.load_checkpoint:
        progress.note(f"load_checkpoint: not read, the weights are in {exported.folder}")
    return ModelFiles(
        exported.manifest.source,
        None,
        model_of_export(exported, config),
        config.checkpoint_seed,
        exported,
        quantization=quantization_of_export(exported, config),
    )
