"""StableLM: a Llama with LayerNorm and rotary positions on a part of each head, whose queries and
keys the 12B norms, too."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, llama_like, row_order
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Norm

_LAYER = "model.layers.{}"
NAMES: Names = {
    **llama_like.NAMES,
    "query_norm": Name(f"{_LAYER}.attention.q_norm", f"{_LAYER}.self_attn.q_layernorm.norms"),
    "key_norm": Name(f"{_LAYER}.attention.k_norm", f"{_LAYER}.self_attn.k_layernorm.norms"),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(num_key_value_heads=32)
    epsilon = fields.number("layer_norm_eps", 1e-5)
    same = fields.with_values(rms_norm_eps=epsilon)
    model = llama_like.decoder(
        architecture="stablelm",
        qkv_bias=fields.flag("use_qkv_bias", False),
        **llama_like.sizes(same, positions=4096, partial=0.25),
    )
    norm, parallel = Norm("layer", epsilon), fields.flag("use_parallel_residual", False)
    own = fields.flag("qk_layernorm", False)
    normed = {"qk_norm": Norm("layer", epsilon, bias=False) if own else None, "qk_norm_apart": own}
    return llama_like.changed(model, normed, norm=norm, parallel=parallel, shared_norm=parallel)


def write(model: Decoder) -> dict[str, Any]:
    found = llama_like.shared(model)
    del found["rms_norm_eps"], found["head_dim"]
    return found | {
        "architectures": ["StableLmForCausalLM"],
        "layer_norm_eps": model.norm_eps,
        "partial_rotary_factor": llama_like.rotated_share(model),
        "use_qkv_bias": model.attention.qkv_bias,
        "use_parallel_residual": model.blocks[0].parallel,
        "qk_layernorm": model.attention.qk_norm is not None,
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of blocks by their norms, as in llama.cpp; the rotated part of a head."""
    parallel = "blk.0.ffn_norm.weight" not in tensors
    found = llama_like.infer_rotated_share(tensors, given)
    return found | {"use_parallel_residual": parallel}


STABLELM = Architecture(
    "stablelm",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.layer_norm_keys("layer_norm_eps")
        | llama_like.PARTIAL_KEYS
        | {"use_parallel_residual": "use_parallel_residual"},
        flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
        infer=infer_from_gguf,
        rows=row_order.rotated_first(apart),
    ),
    stored_rows=row_order.rotated_first(apart),
    tensor_by_head=True,
)
