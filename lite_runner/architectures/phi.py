"""Phi-1 and Phi-2: LayerNorm, rotary positions on a part of each head, attention and feed-forward
that share a norm, and a head with a bias."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, llama_like, row_order, starcoder2
from lite_runner.architectures.fields import TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import Decoder, Norm

_LAYER = "model.layers.{}"
NAMES: Names = {
    **{role: name for role, name in starcoder2.NAMES.items() if role != "feed_forward_norm"},
    "attention_out": Name(f"{_LAYER}.attention.wo", f"{_LAYER}.self_attn.dense"),
    "up": Name(f"{_LAYER}.feed_forward.w1", f"{_LAYER}.mlp.fc1"),
    "down": Name(f"{_LAYER}.feed_forward.w2", f"{_LAYER}.mlp.fc2"),
    "query_norm": Name(f"{_LAYER}.attention.q_norm", f"{_LAYER}.self_attn.q_layernorm"),
    "key_norm": Name(f"{_LAYER}.attention.k_norm", f"{_LAYER}.self_attn.k_layernorm"),
    "norm": Name("model.norm_out", "model.final_layernorm"),
}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(hidden_act="gelu_new")
    epsilon = fields.number("layer_norm_eps", 1e-5)
    sizes = llama_like.sizes(fields.with_values(rms_norm_eps=epsilon), positions=2048, partial=0.5)
    # transformers ties the weights of a tied head, but not its bias.
    if sizes["tie_word_embeddings"]:
        raise fields.invalid("tie_word_embeddings", True, "false: its head has a bias")
    norm = Norm("layer", epsilon)
    model = llama_like.decoder(
        architecture="phi", qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True, **sizes
    )
    return llama_like.changed(
        model,
        {"qk_norm": norm if fields.flag("qk_layernorm", False) else None},
        {"gated": False},
        norm=norm,
        parallel=True,
        shared_norm=True,
    )


def write(model: Decoder) -> dict[str, Any]:
    found = llama_like.shared(model)
    del found["rms_norm_eps"], found["head_dim"]
    return found | {
        "architectures": ["PhiForCausalLM"],
        "layer_norm_eps": model.norm_eps,
        "partial_rotary_factor": llama_like.rotated_share(model),
        "qk_layernorm": model.attention.qk_norm is not None,
    }


PHI = Architecture(
    "phi",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.layer_norm_keys("layer_norm_eps") | llama_like.PARTIAL_KEYS,
        infer=llama_like.infer_rotated_share,
        name="phi2",
        rows=row_order.rotated_first(apart),
    ),
    no_effect={"embd_pdrop": TRAINING, "resid_pdrop": TRAINING},
    stored_rows=row_order.rotated_first(apart),
)
