"""GLM-4.5 to 4.7: rotary positions on a part of each head, experts that are chosen by sigmoids
and a bias, a network beside them, and dense layers first."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import (
    GGUF,
    Architecture,
    apart,
    experts,
    llama_like,
    qwen3,
    row_order,
)
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder

NAMES: Names = {**qwen3.NAMES, **llama_like.POST_ATTENTION_NORM, **experts.GROUPED_NAMES}

# moe_intermediate_size of a config.json that leaves it out, as transformers has it.
_WIDTH = 1408


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    sizes = llama_like.sizes(fields, positions=131072, partial=1.0)
    return llama_like.decoder(
        architecture="glm4_moe",
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
        mixture=Mixture(
            experts.grouped(fields, count=128, chosen=8, groups=(1, 1), scale=1.0, width=_WIDTH),
            fields.integer("moe_intermediate_size", default=_WIDTH),
            range(fields.index("first_k_dense_replace", 1)),
        ),
        **sizes,
    )


def write(model: Decoder) -> dict[str, Any]:
    return (
        llama_like.shared(model)
        | experts.grouped_to_settings(model)
        | {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": model.attention.qkv_bias,
            "partial_rotary_factor": llama_like.rotated_share(model),
            "use_qk_norm": model.attention.qk_norm is not None,
        }
    )


GLM4_MOE = Architecture(
    "glm4_moe",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.KEYS | llama_like.PARTIAL_KEYS | experts.GROUPED_KEYS,
        flags=llama_like.BIAS_FLAG | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        infer=llama_like.infer_rotated_share,
        name="glm4moe",
        rows=row_order.rotated_first(apart),
    ),
    no_effect=experts.NO_EFFECT | experts.NEXT_TOKEN,
    stored_rows=row_order.rotated_first(apart),
    next_token_layers=True,
)
