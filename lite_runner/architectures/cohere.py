"""Command-R and Command-A: LayerNorm without a bias, which attention and feed-forward share, and
scaled logits; Command-A has windows, and positions only where these are."""

from __future__ import annotations

import dataclasses
from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, llama, llama_like, row_order
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Norm

NAMES: Names = {
    **{role: name for role, name in llama_like.NAMES.items() if role != "feed_forward_norm"},
    **llama_like.QUERY_KEY_NORMS,
}


def read(fields: Fields, architecture: str) -> Decoder:
    theta = 500000.0 if architecture == "cohere" else 10000.0
    fields = fields.with_defaults(tie_word_embeddings=True, rope_theta=theta, sliding_window=4096)
    epsilon = fields.number("layer_norm_eps", 1e-5)
    sizes = llama_like.sizes(fields.with_values(rms_norm_eps=epsilon), positions=8192)
    bias = fields.flag("attention_bias", False)
    norm, own = Norm("layer", epsilon, bias=False), False
    windows: tuple[int | None, ...] = ()
    if architecture == "cohere":
        own = fields.flag("use_qk_norm", False)
    else:
        fields.neutral(use_qk_norm=False)
        period = fields.integer("sliding_window_pattern", default=4)
        windows = llama.read_periodic_windows(fields, sizes["num_layers"], period)
    model = llama_like.decoder(
        architecture=architecture,
        qkv_bias=bias,
        out_bias=bias,
        logits_scaling=1 / fields.number("logit_scale", 0.0625),
        local_rotary=sizes["rotary"],
        windows=windows,
        rotary_layers=[window is not None for window in windows],
        **sizes,
    )
    normed = {"qk_norm": norm if own else None, "qk_norm_apart": own}
    return llama_like.changed(model, normed, norm=norm, parallel=True, shared_norm=True)


def write(model: Decoder) -> dict[str, Any]:
    found = llama_like.shared(model)
    del found["rms_norm_eps"], found["head_dim"]
    found |= {
        "attention_bias": model.attention.qkv_bias,
        "layer_norm_eps": model.norm_eps,
        "logit_scale": 1 / model.logits_scaling,
    }
    if model.architecture == "cohere":
        own = model.attention.qk_norm is not None
        return found | {"architectures": ["CohereForCausalLM"], "use_qk_norm": own}
    kinds = llama.layer_types(model, 4096)
    return found | kinds | {"architectures": ["Cohere2ForCausalLM"]}


_KEYS = llama_like.layer_norm_keys("layer_norm_eps") | {"logit_scale": "logit_scale"}
_ROWS = row_order.interleaved(apart)
COHERE = Architecture(
    "cohere",
    lambda fields: read(fields, "cohere"),
    NAMES,
    write,
    gguf=GGUF(
        _KEYS,
        flags=llama_like.BIAS_FLAG | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
        name="command-r",
        rows=_ROWS,
    ),
    no_effect={"sliding_window": "of Command-A"},
    stored_rows=_ROWS,
)
COHERE2 = dataclasses.replace(
    COHERE,
    name="cohere2",
    read=lambda fields: read(fields, "cohere2"),
    gguf=GGUF(
        _KEYS | {"sliding_window": "attention.sliding_window"},
        flags=llama_like.BIAS_FLAG,
        rows=_ROWS,
    ),
    no_effect={},
)
