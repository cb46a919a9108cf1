"""StarCoder2: LayerNorm and a feed-forward network of two layers as in GPT-2, with rotary
positions, grouped heads and a sliding window."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lite_runner.architectures import (
    GGUF,
    Architecture,
    MindFormers,
    gpt2,
    llama_like,
    shared_settings,
)
from lite_runner.architectures.fields import KERNEL, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import RotarySettings
from lite_runner.architectures.spec import Attention, Block, Decoder, FeedForward, Norm, Rotary
from lite_runner.records import Positive, dataclass

EXACT_GELU = "gelu"  # transformers' name of it
_LAYER = "model.layers.{}"
NAMES: Names = {
    **{role: name for role, name in llama_like.NAMES.items() if role != "gate"},
    "up": Name(f"{_LAYER}.feed_forward.w1", f"{_LAYER}.mlp.c_fc"),
    "down": Name(f"{_LAYER}.feed_forward.w2", f"{_LAYER}.mlp.c_proj"),
}


def decoder(
    attention: Attention,
    feed_forward: FeedForward,
    *,
    architecture: str = "starcoder2",
    num_layers: int,
    seq_length: int,
    norm_eps: float,
    parallel: bool = False,
    **rest: Any,
) -> Decoder:
    """A decoder of such equal blocks with LayerNorm; `rest` are fields of Decoder.

    A window of at least seq_length masks nothing and counts as none.
    """
    if attention.window is not None and attention.window >= seq_length:
        attention = dataclasses.replace(attention, window=None)
    norm = Norm("layer", norm_eps)
    blocks = (Block(norm, attention, feed_forward, parallel=parallel),) * num_layers
    return Decoder(architecture, seq_length=seq_length, blocks=blocks, norm=norm, **rest)


def sizes(
    fields: Fields, bias: str, eps: str, *, positions: int, partial: float | None = None
) -> dict[str, Any]:
    """The fields of config.json that StarCoder2 and GPT-NeoX share, as `decoder` takes it.

    `bias`, `eps`: keys of the flag for biases, and of the norms' epsilon; the others are those of
    llama_like.sizes.
    """
    activation = gpt2.read_activation(fields, "hidden_act")
    epsilon = fields.number(eps, 1e-5)
    same = fields.with_values(hidden_act=None, rms_norm_eps=epsilon)
    found = llama_like.sizes(same, positions=positions, partial=partial)
    biased = fields.flag(bias, True)
    found["attention"] = Attention(
        found.pop("num_heads"),
        found.pop("n_kv_heads"),
        found.pop("head_dim"),
        found.pop("rotary"),
        qkv_bias=biased,
        out_bias=biased,
    )
    width = found.pop("intermediate_size")
    return found | {"feed_forward": FeedForward(width, False, biased, activation)}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        hidden_act=gpt2.TANH_GELU[1],
        tie_word_embeddings=True,
    )
    found = sizes(fields, "use_bias", "norm_epsilon", positions=4096)
    window = fields.optional_integer("sliding_window")
    found["attention"] = dataclasses.replace(found["attention"], window=window)
    return decoder(**found)


def shared(model: Decoder) -> dict[str, Any]:
    """The part of config.json that StarCoder2 and GPT-NeoX share."""
    name = gpt2.ACTIVATIONS[model.feed_forward.function]
    found = llama_like.shared(model) | {"hidden_act": name}
    del found["rms_norm_eps"]
    return found


def write(model: Decoder) -> dict[str, Any]:
    return shared(model) | {
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": model.norm_eps,
        "sliding_window": model.attention.window,
        "use_bias": model.feed_forward.bias,
    }


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RotaryLayerNormSettings(RotarySettings):
    """Settings of StarCoder2 and GPT-NeoX."""

    layernorm_epsilon: Positive
    activation: Literal["gelu", "gelu_exact", "quick_gelu", "relu"]  # gelu: the tanh form
    use_parallel_residual: bool = False  # attention and feed-forward take the same input


@dataclass(frozen=True, kw_only=True)
class Starcoder2Settings(RotaryLayerNormSettings):
    """Settings of StarCoder2."""

    type: Literal["Starcoder2Config"] = "Starcoder2Config"


def settings(model: Decoder) -> dict[str, Any]:
    """MindFormers-like settings besides the shared ones; MindFormers has neither family."""
    rotary, attention = model.rotary or Rotary(), model.attention
    return {
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "layernorm_epsilon": model.norm_eps,
        "theta": rotary.theta,
        "rope_scaling": None if rotary.scaling is None else dataclasses.asdict(rotary.scaling),
        "partial_rotary_factor": None if rotary.dims is None else rotary.dims / model.head_dim,
        "qkv_has_bias": attention.qkv_bias,
        "attn_proj_has_bias": attention.out_bias,
        "mlp_bias": model.feed_forward.bias,
        "activation": model.feed_forward.function,
        "sliding_window": attention.window,
        "use_parallel_residual": model.blocks[0].parallel,
    }


def sizes_of_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings`, as `decoder` takes it."""
    head_dim = given["head_dim"] or given["hidden_size"] // given["num_heads"]
    factor, function = given["partial_rotary_factor"], given["activation"]
    dims = None if factor is None else int(head_dim * factor)
    attention = Attention(
        given["num_heads"],
        given["n_kv_heads"] or given["num_heads"],
        head_dim,
        Rotary(given["theta"], given["rope_scaling"], dims),
        qkv_bias=given["qkv_has_bias"],
        out_bias=given["attn_proj_has_bias"],
        window=given["sliding_window"],
    )
    activation = None if function == "gelu" else function
    found = shared_settings(given)
    del found["num_heads"]
    return found | {
        "attention": attention,
        "feed_forward": FeedForward(
            given["intermediate_size"], False, given["mlp_bias"], activation
        ),
        "norm_eps": given["layernorm_epsilon"],
        "parallel": given["use_parallel_residual"],
    }


def from_settings(given: Mapping[str, Any]) -> Decoder:
    return decoder(**sizes_of_settings(given))


STARCODER2 = Architecture(
    "starcoder2",
    read,
    NAMES,
    write,
    MindFormers(
        Starcoder2Settings,
        "Starcoder2ForCausalLM",
        "llama",
        settings,
        from_settings,
        model="starcoder2_3b",
    ),
    GGUF(
        {
            "num_key_value_heads": "attention.head_count_kv",
            "head_dim": "attention.key_length",
            "norm_epsilon": "attention.layer_norm_epsilon",
            "sliding_window": "attention.sliding_window",
        },
        flags={"use_bias": "blk.0.attn_q.bias"},
    ),
    no_effect={
        "embedding_dropout": TRAINING,
        "residual_dropout": TRAINING,
        "activation_function": "hidden_act is beside it",
        "layer_norm_epsilon": "norm_epsilon is beside it",
        "mlp_type": "of the code that trained it",
        "norm_type": "of the code that trained it",
        "attention_softmax_in_fp32": KERNEL,
        "scale_attention_softmax_in_fp32": KERNEL,
        "scale_attn_weights": "transformers does not read it",
    },
)
