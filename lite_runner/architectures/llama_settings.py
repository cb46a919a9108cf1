"""MindFormers' LlamaConfig, read and written. Sliding windows, which it lacks, have HF's keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lite_runner.architectures import windows
from lite_runner.architectures.architecture import shared_settings
from lite_runner.architectures.llama_like import decoder
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
        **windows.to_settings(model),
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


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """The inverse of `settings`."""
    return decoder(**sizes_of_settings(given))


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
        "windows": windows.from_settings(given),
        "embedding_scale": given["embedding_multiplier"],
        "scale": given["attention_multiplier"],
        "residual_scale": given["residual_multiplier"],
        "logits_scaling": given["logits_scaling"],
        "rotary_layers": [one == 1 for one in given["no_rope_layers"] or ()],
    }
