"""Weight files as others define them: safetensors, ckpt, GGUF, PyTorch, Hugging Face.

In this module: Hugging Face's config.json, of transformers 4 and 5, to and from a Decoder.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from lite_runner import progress
from lite_runner.architectures import KNOWN, architecture_of, named_in
from lite_runner.architectures.fields import NO_EFFECT, Fields, refuse_variants
from lite_runner.architectures.spec import Decoder
from lite_runner.config import did_you_mean, nearest
from lite_runner.errors import ConfigError

# Names of files in a Hugging Face folder.
INDEX, TORCH_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "ice_text.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

# Of config.json: the number of layers for multi-token prediction, behind the model's own.
_FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")


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
        # Other families have similar names: gpt_oss and gpt_neox, falcon_h1 and falcon.
        near = nearest(model_type, KNOWN, 0.8) if isinstance(model_type, str) else None
        if near is not None and re.fullmatch(rf"{re.escape(near)}(_.*|\d+)", str(model_type)):
            near = None
        expected = f"one of {', '.join(KNOWN)}{did_you_mean(near)}"
        raise fields.invalid("model_type", model_type, expected)
    if (packed := fields.raw.get("quantization_config")) is not None:
        from lite_runner.weights.formats.packed_layouts import check_described

        check_described(packed, where)
    if architecture.text_of:
        text = _text_config(fields, architecture.text_of)
        if notes:
            progress.note(f"{where}: only its text model is read: prompts cannot have images")
        return model_config_from_hf(text, f"{where}: text_config", notes=notes)
    refuse_variants(fields)
    if not architecture.layers_differ:
        fields.neutral(per_layer_config={})
    model = architecture.read(fields)
    unknown = [
        key for key in fields.unread() if key not in NO_EFFECT and key not in architecture.no_effect
    ]
    if unknown and notes:
        progress.note(f"{where}: {_listed(unknown)}: not a field of {model_type}, and not followed")
    if notes and any(raw.get(key) for key in _FURTHER_LAYERS):
        progress.note(f"{where}: layers for multi-token prediction are read by speculate=mtp alone")
    # A description that is registered under another name is that name's.
    return replace(model, architecture=architecture.name)


def _text_config(fields: Fields, model_type: str) -> dict[str, Any]:
    """The config.json of the text model alone, of a model that has other parts too; special tokens
    are the whole model's where it has any."""
    shared = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    outer = {name: fields.raw[name] for name in shared if fields.raw.get(name) is not None}
    if fields.raw.get("text_config") is not None:
        text = {**fields.section("text_config").raw, **outer}
    elif fields.raw.get("vision_config") is not None:  # the first files have no such section
        text = {key: one for key, one in fields.raw.items() if not key.startswith(_OF_IMAGES)}
    else:
        raise fields.invalid("text_config", None, "an object")
    for key in ("rope_scaling", "rope_parameters"):
        rope = text.get(key)
        if isinstance(rope, dict) and "mrope_section" in rope:
            # In a text the three kinds of positions are equal.
            rope = {name: one for name, one in rope.items() if not name.startswith("mrope_")}
            kinds = ("type", "rope_type")
            text[key] = {n: one for n, one in rope.items() if n not in kinds or one != "mrope"}
    return text | {"model_type": model_type}


_OF_IMAGES = ("vision_", "image_", "video_")


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
            f"{model.architecture}: its config.json cannot express {', '.join(lost)}",
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
        if name not in free and read.get(name) != value
    ]
