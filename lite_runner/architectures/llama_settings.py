"""MindFormers' LlamaConfig, read and written; sliding windows, under Hugging Face's keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lite_runner.architectures.architecture import MindFormers, shared_settings
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder, Rotary


def settings(model: Decoder) -> dict[str, Any]:
    """Settings besides the shared ones."""
    rotary = model.rotary or Rotary()
    return {
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "rms_norm_eps": model.norm_eps,
        "theta": rotary.theta,
        "rope_scaling": None if rotary.scaling is None else dataclasses.asdict(rotary.scaling),
        **({} if rotary.dims is None else {"partial_rotary_factor": rotary.dims / model.head_dim}),
        "qkv_has_bias": model.attention.qkv_bias,
        "attn_proj_has_bias": model.attention.out_bias,
        "mlp_bias": model.feed_forward.bias,
        **windows_to_settings(model),
        **(multipliers(model) if multipliers(model) != _NO_MULTIPLIERS else {}),
        **({} if all(no_rope_layers(model)) else {"no_rope_layers": no_rope_layers(model)}),
    }


_NO_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def multipliers(model: Decoder) -> dict[str, Any]:
    """A Granite's multipliers under Hugging Face's names."""
    return {
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": model.attention.scale,
        "residual_multiplier": model.blocks[0].residual_scale,
        "logits_scaling": model.logits_scaling,
    }


def no_rope_layers(model: Decoder) -> list[int]:
    """As Hugging Face has it: 1 for each layer with rotary positions, 0 for the others."""
    return [int(block.attention.rotary is not None) for block in model.blocks]


def mindformers(
    config: str,
    network: str,
    make: Callable[..., Decoder],
    write: Callable[[Decoder], dict[str, Any]] = settings,
) -> MindFormers:
    """Settings under LlamaConfig's names, for the architecture whose decoders `make` makes of
    sizes."""

    def read(given: Mapping[str, Any]) -> Decoder:
        return make(**sizes_of_settings(given))

    return MindFormers(config, network, "llama", write, read)


def sizes_of_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings`, as `decoder` takes it."""
    head_dim = given["head_dim"] or given["hidden_size"] // given["num_heads"]
    factor = given["partial_rotary_factor"]
    dims = None if factor is None else int(head_dim * factor)
    return shared_settings(given) | {
        "n_kv_heads": given["n_kv_heads"] or given["num_heads"],
        "head_dim": head_dim,
        "intermediate_size": given["intermediate_size"],
        "norm_eps": given["rms_norm_eps"],
        "rotary": Rotary(given["theta"], given["rope_scaling"], dims),
        "qkv_bias": given["qkv_has_bias"],
        "out_bias": given["attn_proj_has_bias"],
        "mlp_bias": given["mlp_bias"],
        "windows": windows_from_settings(given),
        "embedding_scale": given["embedding_multiplier"],
        "scale": given["attention_multiplier"],
        "residual_scale": given["residual_multiplier"],
        "logits_scaling": given["logits_scaling"],
        "rotary_layers": [one == 1 for one in given["no_rope_layers"] or ()],
    }


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, from config.json."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    slides, given = fields.flag("use_sliding_window", False), fields.raw["sliding_window"]
    window = fields.integer("sliding_window") if slides and given is not None else None
    first, kinds = fields.raw["max_window_layers"], fields.raw.get("layer_types")
    if kinds is None:
        if window is not None and (type(first) is not int or first < 0):
            raise fields.fault("max_window_layers", first, "an integer from 0")
        return per_layer(window, layers, first if window else 0, None)
    expected = f"a list of {layers}, each {FULL}" + (f" or {SLIDING}" if window else ": no window")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fault("layer_types", kinds, expected)
    for kind in kinds:
        if kind != FULL and (kind != SLIDING or window is None):
            raise fields.fault("layer_types", kind, expected)
    return per_layer(window, layers, 0, kinds)


def periodic(layers: int, period: int) -> list[str]:
    """Kinds of layers of which every `period`th has no window."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]


def per_layer(
    window: int | None, layers: int, first: int, kinds: Sequence[str] | None
) -> tuple[int | None, ...]:
    """Sliding window per layer: for layers from `first` on, or by their `kinds`."""
    slides = [layer >= first for layer in range(layers)]
    if kinds is not None:
        slides = [kind == SLIDING for kind in kinds]
    return tuple(window if here else None for here in slides)


def windows_from_settings(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Sliding window per layer, from MindFormers settings."""
    window = given["sliding_window"] if given["use_sliding_window"] else None
    kinds, period = given["layer_types"], given["sliding_window_pattern"]
    if kinds is None and period is not None:
        kinds = periodic(given["num_layers"], period)
    return per_layer(window, given["num_layers"], given["max_window_layers"], kinds)


def windows_to_settings(model: Decoder) -> dict[str, Any]:
    """The inverse of `read_windows` and `windows_from_settings`."""
    slides = [window is not None for window in model.windows]
    if not any(slides):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": max(window or 0 for window in model.windows),
        "max_window_layers": slides.index(True),
        "layer_types": [SLIDING if here else FULL for here in slides],
    }
