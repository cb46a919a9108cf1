"""Mixtral: a Mistral with experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lite_runner.architectures import experts, llama, llama_like, llama_settings
from lite_runner.architectures.architecture import MindFormers
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Experts

NAMES: Names = {
    **llama_like.NAMES,
    **experts.names(
        ("feed_forward.router.dense", "block_sparse_moe.gate"),
        ("feed_forward.ffn", "block_sparse_moe.experts"),
        ("w1", "w2", "w3"),
    ),
}


def read(fields: Fields) -> Decoder:
    """From config.json."""
    fields = fields.with_defaults(
        num_key_value_heads=8, rope_theta=1000000.0, rms_norm_eps=1e-5, sliding_window=None
    )
    sizes = llama_like.sizes(fields, positions=131072)
    window = fields.optional_integer("sliding_window")
    count, chosen = experts.counts(fields, experts=8, chosen=2)
    return llama_like.decoder(
        architecture="mixtral",
        windows=(window,) * sizes["num_layers"],
        mixture=Mixture(Experts(count, chosen), sizes["intermediate_size"]),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json."""
    given = experts.to_settings(model)
    return llama_like.shared(model) | {
        "architectures": ["MixtralForCausalLM"],
        "sliding_window": model.attention.window,
        "num_local_experts": given["num_experts"],
        "num_experts_per_tok": given["num_experts_per_tok"],
    }


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers settings besides the shared ones."""
    return llama_settings.settings(model) | experts.to_settings(model)


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """The inverse of `settings`."""
    return llama_like.decoder(
        architecture="mixtral",
        mixture=experts.from_settings(given),
        **llama_settings.sizes_of_settings(given),
    )


MIXTRAL = dataclasses.replace(
    llama.LLAMA,
    name="mixtral",
    read=read,
    names=NAMES,
    write=write,
    mindformers=MindFormers(
        "MixtralConfig", "MixtralForCausalLM", "llama", settings, from_settings
    ),
    gguf=None,  # GGUF writes it as llama
    no_effect=experts.NO_EFFECT,
)
