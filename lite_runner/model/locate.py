"""Locate the model of a run: fetch it unless it is cached, read its sizes, compare both.

No weights are read, so that whatever is wrong with the files shows at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import progress
from lite_runner.architectures import architecture_of
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.config import raise_errors
from lite_runner.config.checks import unavailable
from lite_runner.config.sections import RANDOM, ModelSource
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model import ModelFiles
from lite_runner.weights.checkpoint import (
    check_file,
    gguf_at,
    is_packed,
    model_config_in,
    model_config_of,
    rank_folders,
)
from lite_runner.weights.formats.gguf_file import GGUFFile
from lite_runner.weights.source import cached, fetch, is_on_hub

if TYPE_CHECKING:
    from lite_runner.model.exported_model import ExportedModel


def locate(source: ModelSource, *, weights: bool = True) -> ModelFiles:
    """Fetch what a run names, unless it is here, and read the model's sizes.

    Without `weights`, which a tokenizer does not need, those on the hub are not fetched. Raises
    ArtifactError where the model cannot be had or is not the one that the run names.
    """
    if source.exported is not None:
        return _exported(source)
    model = _configured_model(source)
    if source.checkpoint == RANDOM:
        if model is None:
            raise ConfigError(
                "model=auto takes the model's sizes from its checkpoint, and "
                "load_checkpoint=random has none",
                "name a model (model=tiny_llama), or a checkpoint (load_checkpoint=DIR)",
            )
        return _with_own_adapter(not_here(source, model), source)
    key = "pretrained_model_dir" if source.checkpoint == source.folder else "load_checkpoint"
    path = fetch(source.checkpoint, key, weights=weights)
    # A folder from the hub without weights holds no checkpoint, which is no error here.
    alone = not weights and is_on_hub(source.checkpoint) and path.is_dir()
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
    quantization = quantization_of(source, path, gguf)
    if weights and not sharded and source.quant is None and is_packed(path):
        quantization = Quantization("file")
    files = ModelFiles(
        source.checkpoint,
        path,
        model,
        source.seed,
        strategy=Path(source.strategy).expanduser() if source.strategy else None,
        auto_trans=source.auto_trans,
        quantization=quantization,
        gguf=gguf,
    )
    return _with_own_adapter(files, source) if weights else files


def _with_own_adapter(files: ModelFiles, source: ModelSource) -> ModelFiles:
    if source.pet is None:
        return files
    from lite_runner.model.adapters import with_pet_lora  # not for other runs

    return with_pet_lora(files, source.pet, source.adapters)


def locate_cached(source: ModelSource) -> ModelFiles:
    """As `locate`, but nothing is fetched: the path is None where something would be.

    Raises ArtifactError for a file that is missing from this machine, and for model=auto where the
    sizes are in what would be fetched.
    """
    if source.checkpoint == RANDOM or source.exported is not None:
        return locate(source)
    here = cached(source.checkpoint)
    key, folder = "pretrained_model_dir", source.folder
    if here is not None and (not folder or cached(folder, key, weights=False) is not None):
        return locate(dataclasses.replace(source, checkpoint=str(here)))
    if source.model is None:
        raise ArtifactError(
            f"{source.checkpoint}: not in the cache, and model=auto has the model's sizes from it",
            "dry_run=true fetches nothing: name the model, or run without it once",
        )
    return not_here(source, source.model)


def not_here(source: ModelSource, model: Decoder) -> ModelFiles:
    """The files of a model whose weights are not on this machine, or random."""
    return ModelFiles(source.checkpoint, None, model, source.seed, quantization=source.quantization)


def locate_for_plan(source: ModelSource) -> ModelFiles:
    """The files of a run, an adapter of adapter_path not merged; with dry_run=true nothing is
    fetched. Raises ArtifactError, ConfigError."""
    named = source.adapters is not None and source.adapters.path  # a script may load them later
    if source.pet is not None and source.checkpoint == RANDOM and not named:
        raise ConfigError(
            "model.model_config.pet_config.pet_type=lora: random weights have no LoRA weights",
            "load_checkpoint= a checkpoint that holds them, or adapter_path= an adapter's folder",
        )
    return locate_cached(source) if source.dry_run else locate(source)


def _configured_model(source: ModelSource) -> Decoder | None:
    """The model that a run describes, or pretrained_model_dir; None: the checkpoint does.

    Raises ArtifactError where that folder has no config.json.
    """
    key = "pretrained_model_dir"
    if source.model is not None or source.folder in ("", source.checkpoint):
        return source.model
    folder = fetch(source.folder, key, weights=False)
    model = model_config_in(folder)
    if model is None:
        raise ArtifactError(
            f"{key}: {folder} has no config.json, which says what the model is",
            "give the folder as it comes from Hugging Face",
        )
    return model


def _exported(source: ModelSource) -> ModelFiles:
    """The files of an exported model, which takes the place of a checkpoint. Raises ArtifactError
    where it is another one than the run's."""
    from lite_runner.model.exported_model import exported_model

    exported = exported_model(source)
    assert exported is not None, "it is named"
    if source.named:
        progress.note(f"load_checkpoint: not read, the weights are in {exported.folder}")
    if source.quant not in (None, "none"):
        raise ArtifactError(
            f"{exported.folder}: its graphs compute with floats, this run asks for"
            f" quant={source.quant}",
            "leave quant= out, or run the checkpoint with backend=native",
        )
    model = _model_of_export(exported, source.model, source.name)
    return ModelFiles(exported.manifest.source, None, model, source.seed, exported)


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


def quantization_of(source: ModelSource, path: Path, gguf: GGUFFile | None = None) -> Quantization:
    """Quantization of the weights in memory: the run's, or that of a quantized checkpoint.
    `gguf`: the file at `path`, if it is one.

    Raises ArtifactError where the two differ, ConfigError for what cannot be computed.
    """
    asked, manifest = source.quantization, None
    if gguf is not None and gguf.quantized and source.quant in (None, "a8"):
        return Quantization(source.quant or "file")
    if source.quant == "a8":
        raise ArtifactError(
            f"{path}: quant=a8 computes with the blocks of a quantized GGUF file, and this is none",
            "quant=a8w8, which makes integers of the weights too",
        )
    if gguf is None:
        from lite_runner.weights.quantization.quantized_checkpoint import read_quantization

        manifest = read_quantization(path)
    if manifest is None:
        return asked
    manifest.check_files(path if path.is_dir() else path.parent)
    stored = manifest.quantization
    if source.quant is None:
        what = f"{path}: quant={stored}"
        raise_errors(unavailable(source.floats_only, what, "load_checkpoint"))
        return stored
    if source.quant_group is None and asked.quant == stored.quant:
        asked = dataclasses.replace(asked, group=stored.group)
    if source.modules_to_not_convert is None:
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
