"""Hugging Face's config.json, of transformers 4 and 5, to and from a Decoder.

Packed weights of other tools (GPTQ, AWQ, FP8, ...) are recognized to be refused by their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.architectures import KNOWN, architecture_of, named_in
from lite_runner.architectures.fields import NO_EFFECT, Fields, refuse_variants
from lite_runner.architectures.spec import Decoder
from lite_runner.config.fields import did_you_mean, nearest
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.system.json_file import read_json_object


def model_config_from_hf(raw: dict[str, Any], where: str, *, notes: bool = True) -> Decoder:
    """The model that config.json describes.

    `where` names the file in errors. Raises ArtifactError for a value of the wrong type or range,
    and for every variant of an architecture that is not computed. With `notes`, the fields that
    its architecture does not know are named in a note.
    """
    fields = Fields(raw, where)
    model_type = fields.raw.get("model_type")
    architecture = named_in(fields.raw)
    if architecture is None:
        near = nearest(model_type, KNOWN) if isinstance(model_type, str) else None
        expected = f"one of {', '.join(KNOWN)}{did_you_mean(near)}"
        raise fields.fault("model_type", model_type, expected)
    if (packed := fields.raw.get("quantization_config")) is not None:
        raise packed_weights_error(where, described(packed if isinstance(packed, dict) else {}))
    if architecture.text_of:
        text = _text_config(fields, architecture.text_of)
        if notes:
            progress.note(f"{where}: only its text model is read: prompts cannot have images")
        return model_config_from_hf(text, f"{where}: text_config", notes=notes)
    refuse_variants(fields)
    model = architecture.read(fields)
    unknown = [
        key for key in fields.unread() if key not in NO_EFFECT and key not in architecture.no_effect
    ]
    if unknown and notes:
        progress.note(f"{where}: {_listed(unknown)}: not a field of {model_type}, and not followed")
    # A description that is registered under another name is that name's.
    return replace(model, architecture=architecture.name)


def _text_config(fields: Fields, model_type: str) -> dict[str, Any]:
    """The config.json of the text model alone, of a model that has other parts too; special tokens
    are the whole model's where it has any."""
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    outer = {name: fields.raw[name] for name in shared if fields.raw.get(name) is not None}
    if fields.raw.get("text_config") is None:
        raise fields.fault("text_config", None, "an object")
    return {**fields.section("text_config").raw, **outer, "model_type": model_type}


def _listed(names: list[str]) -> str:
    """Names of an untrusted file, for a message."""
    shown = [name if name.isprintable() and len(name) <= 60 else ascii(name[:60]) for name in names]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(shown[:8]) + more


def hf_from_model_config(model: Decoder) -> dict[str, Any]:
    """The config.json of a model, in words that transformers 4 and 5 both read.

    ConfigError for an architecture that transformers does not have, and for a model that it would
    compute otherwise.
    """
    write = architecture_of(model).write
    if write is None:
        raise ConfigError(
            f"{model.architecture}: a registered family, which Hugging Face's format does not know",
            "convert_format=ckpt or convert_format=safetensors",
        )
    eos = model.eos_token_id
    raw = {
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": model.pad_token_id,
        "model_type": model.architecture,
        **write(model),
    }
    lost = _lost(model, raw)
    if lost:
        raise ConfigError(
            f"{model.architecture}: its config.json has no words for {', '.join(lost)}",
            "convert_format=ckpt or convert_format=safetensors",
        )
    return raw


def _lost(model: Decoder, raw: dict[str, Any]) -> list[str]:
    """Sizes that a model's config.json loses; its context and special tokens are a run's own."""
    tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
    free = ("seq_length", "rope_scaling", *tokens)
    # A prefix ends with its model's bos.
    cleared = dict.fromkeys(tokens if model.prefix is None else tokens[1:])
    read = model_config_from_hf(raw | cleared, "config.json").sizes()
    return [
        f"{name}={value}"
        for name, value in model.sizes().items()
        if name not in free and read[name] != value
    ]


# quant_method of a quantization_config -> the name that its users know.
_METHODS = {
    **{"gptq": "GPTQ", "awq": "AWQ", "fp8": "FP8", "mxfp4": "MXFP4", "exl2": "EXL2"},
    **{"fbgemm_fp8": "FP8", "hqq": "HQQ", "aqlm": "AQLM", "bitnet": "BitNet"},
}
# What the name of a tensor ends with -> the layout, the most telling first.
_ENDINGS = {
    r"\.g_idx": "GPTQ",
    r"\.qweight": "GPTQ or AWQ",
    r"\.weight_packed": "compressed-tensors",
    r"\.weight(\.absmax|\.quant_state\..+|\.quant_map|_format)|\.SCB": "bitsandbytes",
    r"_blocks": "MXFP4",
    r"\.weight_scale": "compressed-tensors",
}
# Where a layout is described, and the quant_method that this means; "": it is in a section.
_FILES = {"config.json": "", "quantize_config.json": "gptq", "quant_config.json": "awq"}
_SECTIONS = ("quantization_config", "compression_config")
_FLOATS = ("F32", "F16", "BF16")


def described(raw: Mapping[str, Any]) -> str:
    """The layout that a quantization_config describes: "GPTQ (4 bits, group 128)"."""
    method = raw.get("quant_method")
    if method is None:
        bnb = any(str(key).startswith(("bnb_", "load_in_")) for key in raw)
        method = "bitsandbytes" if bnb else "a layout without a name"
    name = _METHODS.get(str(method), ascii(str(method)[:40])[1:-1])
    found = dict(raw)
    groups = raw.get("config_groups")
    for one in groups.values() if isinstance(groups, dict) else ():  # of compressed-tensors
        if isinstance(one, dict) and isinstance(weights := one.get("weights"), dict):
            found |= weights
    for count in (4, 8):  # of bitsandbytes
        if raw.get(f"load_in_{count}bit") is True:
            found["bits"] = count
    bits = next((found[key] for key in ("bits", "w_bit", "num_bits") if key in found), None)
    group = next((found[key] for key in ("group_size", "q_group_size") if key in found), None)
    sizes = [f"{bits} bits"] if _is_count(bits) else []
    sizes += [f"group {group}"] if _is_count(group) else []
    return f"{name} ({', '.join(sizes)})" if sizes else name


def layout_in(folder: Path) -> str:
    """The layout that the files of a folder describe; "" where none does."""
    for file, method in _FILES.items():
        try:
            raw = read_json_object(folder / file)
        except ArtifactError:  # not there, or another reader's to refuse
            continue
        if method:
            return described({"quant_method": method} | raw)
        for section in map(raw.get, _SECTIONS):
            if isinstance(section, dict):
                return described(section)
    return ""


def layout_of(names: Iterable[str]) -> str:
    """The layout that tensors of these names have; "" for that of no known tool."""
    listed = list(names)
    for ending, layout in _ENDINGS.items():
        if any(re.search(f"(?:{ending})$", name) for name in listed):
            return layout
    return ""


def packed_weights_error(where: str, layout: str) -> ArtifactError:
    """The error for weights of a layout."""
    return ArtifactError(
        f"{where}: the weights are packed: {layout} is not read yet",
        "take the model's 16-bit checkpoint, which quant=a16w4 or quant=a16w8 makes as small, or a "
        "GGUF file of it",
    )


def tensor_type_error(path: Path, name: str, dtype: str, names: Iterable[str]) -> ArtifactError:
    """The error for a tensor of a type that no weights have, among those of these names."""
    if layout := "FP8" if dtype.startswith("F8_") else layout_of(names):
        return packed_weights_error(str(path), layout_in(path.parent) or layout)
    return ArtifactError(
        f"{path}: tensor {name} is {dtype}, expected one of {', '.join(_FLOATS)}",
        "convert the checkpoint to float32, float16 or bfloat16",
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 20
