"""The config against the files that it names: whether model and quantization are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Set
from pathlib import Path

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import raise_faults
from lite_runner.config.quantization import Quantization
from lite_runner.config.quantization_checks import unavailable
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError
from lite_runner.model.exported_model import ExportedModel
from lite_runner.weights.formats.gguf_file import GGUFFile
from lite_runner.weights.quantization.quantized_checkpoint import read_quantization

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
    """How the weights are held in memory: as the config says, or as a quantized checkpoint is.
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
    stored = manifest.quantization
    if config.quant is None:
        raise_faults(list(unavailable(config, f"{path}: quant={stored}", "load_checkpoint")))
        return stored
    if config.quant_group is None and asked.quant == stored.quant:
        return stored
    if asked.same_weights != stored.same_weights:
        raise ArtifactError(
            f"{path}: quantized as {stored}, this run asks for quant={asked}",
            f"leave quant= out, or give what it was made from: load_checkpoint={manifest.source}",
        )
    return asked


def model_of_export(exported: ExportedModel, config: RunConfig) -> Decoder:
    """The model of an export, with the special tokens of the configured one.

    Raises ArtifactError where the config names another model.
    """
    manifest, configured = exported.manifest, config.model_config()
    if configured is None:
        return manifest.model
    differences = _differences(configured, manifest.model, "the export", TOKEN_FIELDS)
    if differences:
        raise ArtifactError(
            f"{exported.folder}: an export of {manifest.model_name}, another model than "
            f"{config.model_name}: {differences}",
            "leave model= out: the export says which it is",
        )
    tokens = {name: getattr(configured, name) for name in TOKEN_FIELDS}
    return dataclasses.replace(manifest.model, **tokens)


def quantization_of_export(exported: ExportedModel, config: RunConfig) -> Quantization:
    """Raises ArtifactError where the config asks for another one."""
    operators, asked = exported.manifest.operators, config.quantization
    stored = operators.quantization if operators else Quantization()
    differs = asked.quant != stored.quant or (config.quant_group and asked.group != stored.group)
    if config.quant is not None and differs:
        raise ArtifactError(
            f"{exported.folder}: exported with quant={stored}, this run asks for quant={asked}",
            "leave quant= out: the export says which it is",
        )
    return stored


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
