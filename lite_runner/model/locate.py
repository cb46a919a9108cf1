"""Locate the model of a config: fetch it unless it is cached, read its sizes, compare both.

No weights are read, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.checks import unavailable
from lite_runner.config.fields import raise_faults
from lite_runner.config.quantization import Quantization
from lite_runner.config.schema import AdapterOptions, ComputeOptions, RunConfig, StrategyOptions
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.exported_model import ExportedModel, exported_model
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.weights.checkpoint import (
    check_file,
    gguf_at,
    is_packed,
    model_config_in,
    model_config_of,
)
from lite_runner.weights.formats.gguf_file import GGUFFile
from lite_runner.weights.quantization.quantized_checkpoint import read_quantization
from lite_runner.weights.sharding.shard_manifest import rank_folders
from lite_runner.weights.source import cached, fetch


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
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        return _with_own_adapter(_not_here(source, model, config), config)
    key = "pretrained_model_dir" if source == config.pretrained_model_dir else "load_checkpoint"
    path = fetch(source, key, weights=weights)
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
    quantization = quantization_of(config, path, gguf)
    if weights and not sharded and config.quant is None and is_packed(path):
        quantization = Quantization("file")
    strategy = config.src_strategy_path_or_dir if isinstance(config, StrategyOptions) else ""
    files = ModelFiles(
        source,
        path,
        model,
        config.checkpoint_seed,
        strategy=Path(strategy).expanduser() if strategy else None,
        auto_trans=isinstance(config, ComputeOptions) and config.auto_trans_ckpt,
        quantization=quantization,
        gguf=gguf,
    )
    return _with_own_adapter(files, config) if weights else files


def _with_own_adapter(files: ModelFiles, config: RunConfig) -> ModelFiles:
    if not config.merges_adapter:
        return files
    from lite_runner.model.adapters import with_pet_lora  # not for other runs

    return with_pet_lora(files, config)


def locate_cached(config: RunConfig) -> ModelFiles:
    """As `locate`, but nothing is fetched: the path is None where something would be.

    Raises ArtifactError for a file that is missing from this machine, and for model=auto where the
    sizes are in what would be fetched.
    """
    source, folder = config.checkpoint_source, config.pretrained_model_dir
    if source == RANDOM or exported_model(config) is not None:
        return locate(config)
    here = cached(source)
    key = "pretrained_model_dir"
    if here is not None and (not folder or cached(folder, key, weights=False) is not None):
        return locate(dataclasses.replace(config, load_checkpoint=str(here)))
    model = config.model_config()
    if model is None:
        raise ArtifactError(
            f"{source}: not in the cache, and model=auto has the model's sizes from it",
            "dry_run=true fetches nothing: name the model, or run without it once",
        )
    return _not_here(source, model, config)


def _not_here(source: str, model: Decoder, config: RunConfig) -> ModelFiles:
    return ModelFiles(source, None, model, config.checkpoint_seed, quantization=config.quantization)


def locate_for_plan(config: RunConfig) -> ModelFiles:
    """The files of a run, an adapter of adapter_path not merged; with dry_run=true nothing is
    fetched. Raises ArtifactError, ConfigError."""
    if config.merges_adapter and config.checkpoint_source == RANDOM:
        apart = isinstance(config, AdapterOptions) and config.adapter_path
        if not apart:  # a script may load them later
            raise ConfigError(
                "model.model_config.pet_config.pet_type=lora: random weights have no LoRA weights",
                "load_checkpoint= a checkpoint that holds them, or adapter_path= an adapter's"
                " folder",
            )
    return locate_cached(config) if config.dry_run else locate(config)


def _configured_model(config: RunConfig) -> Decoder | None:
    """The model that the config describes, or pretrained_model_dir; None: the checkpoint does.

    Raises ArtifactError where that folder has no config.json.
    """
    model, key = config.model_config(), "pretrained_model_dir"
    if model is not None or config.pretrained_model_dir in ("", config.checkpoint_source):
        return model
    folder = fetch(config.pretrained_model_dir, key, weights=False)
    model = model_config_in(folder)
    if model is None:
        raise ArtifactError(
            f"{key}: {folder} has no config.json, which says what the model is",
            "give the folder as it comes from Hugging Face",
        )
    return model


def _exported(exported: ExportedModel, config: RunConfig) -> ModelFiles:
    """The files of an exported model, which takes the place of a checkpoint. Raises ArtifactError
    where it is another one than the config's."""
    if config.load_checkpoint:
        progress.note(f"load_checkpoint: not read, the weights are in {exported.folder}")
    if config.quant not in (None, "none"):
        raise ArtifactError(
            f"{exported.folder}: its graphs compute with floats, this run asks for"
            f" quant={config.quant}",
            "leave quant= out, or run the checkpoint with backend=native",
        )
    model = _model_of_export(exported, config.model_config(), config.model_name)
    return ModelFiles(exported.manifest.source, None, model, config.checkpoint_seed, exported)


# What a run may choose against its checkpoint: the context length and the special tokens.
TOKEN_FIELDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
FREE_FIELDS = {"seq_length", "rope_scaling", *TOKEN_FIELDS}


def check_same_model(configured: Decoder, stored: Decoder, path: Path) -> None:
    """Raise ArtifactError where the checkpoint at `path` is not of the configured model."""
    differences = _differences(configured, stored, "the checkpoint", FREE_FIELDS)
    if differences:
        raise ArtifactError(
            f"{path} is another model than the config's: {differences}",
            "model=auto takes everything from the checkpoint",
        )


def quantization_of(config: RunConfig, path: Path, gguf: GGUFFile | None = None) -> Quantization:
    """Quantization of the weights in memory: the config's, or that of a quantized checkpoint.
    `gguf`: the file at `path`, if it is one.

    Raises ArtifactError where the two differ, ConfigError for what cannot be computed.
    """
    manifest, asked = read_quantization(path), config.quantization
    if gguf is not None and gguf.quantized and config.quant in (None, "a8"):
        return Quantization(config.quant or "file")
    if config.quant == "a8":
        raise ArtifactError(
            f"{path}: quant=a8 computes with the blocks of a quantized GGUF file, and this is none",
            "quant=a8w8, which makes integers of the weights too",
        )
    if manifest is None:
        return asked
    manifest.check_files(path if path.is_dir() else path.parent)
    stored = manifest.quantization
    if config.quant is None:
        raise_faults(list(unavailable(config, f"{path}: quant={stored}", "load_checkpoint")))
        return stored
    if config.quant_group is None and asked.quant == stored.quant:
        asked = dataclasses.replace(asked, group=stored.group)
    if config.modules_to_not_convert is None:
        asked = dataclasses.replace(asked, kept=stored.kept)
    if asked.same_weights != stored.same_weights:
        raise ArtifactError(
            f"{path}: quantized as {stored}, this run asks for quant={asked}",
            f"leave quant= out, or give what it was made from: load_checkpoint={manifest.source}",
        )
    return asked


def _model_of_export(exported: ExportedModel, configured: Decoder | None, name: str) -> Decoder:
    """The model of an export, with the special tokens of the configured one and its own length.

    Raises ArtifactError where the config names another model.
    """
    manifest = exported.manifest
    if configured is None:
        return manifest.model
    free = {"seq_length", *TOKEN_FIELDS}
    differences = _differences(configured, manifest.model, "the export", free)
    if differences:
        raise ArtifactError(
            f"{exported.folder}: an export of {manifest.model_name}, another model than "
            f"{name}: {differences}",
            "leave model= out: the export says which it is",
        )
    if configured.seq_length != manifest.model.seq_length:
        progress.note(
            f"seq_length {manifest.model.seq_length}, as {exported.folder} was exported;"
            f" {name} has {configured.seq_length}"
        )
    tokens = {field: getattr(configured, field) for field in TOKEN_FIELDS}
    return dataclasses.replace(manifest.model, **tokens)


def _differences(configured: Decoder, stored: Decoder, owner: str, free: Set[str]) -> str:
    """The sizes in which two models differ, but for those that are `free`; "" where in none."""
    asked, found = configured.sizes(), stored.sizes()
    names = architecture_of(stored).names
    if names and names == architecture_of(configured).names:
        # As what MindFormers calls a Llama: the tensors are the same, the rest is compared.
        free = {*free, "family"}
    return "; ".join(
        f"{name}: the config says {asked[name]}, {owner} {found[name]}"
        for name in asked
        if name not in free and asked[name] != found[name]
    )
