"""Llama-like models: blocks, tensor names, and the shared part of config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, Literal

from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.spec import (
    Activation,
    Attention,
    Block,
    Decoder,
    Experts,
    FeedForward,
    Norm,
    RopeScaling,
    Rotary,
)
from lite_runner.records import dataclass

SILU = ("silu", "swish")
# transformers' names of activations; the first one of a function is written.
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(SILU, "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_exact"),
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}

NAMES: Names = {
    "embedding": Name("model.tok_embeddings.embedding_weight", "model.embed_tokens"),
    "query": Name("model.layers.{}.attention.wq", "model.layers.{}.self_attn.q_proj"),
    "key": Name("model.layers.{}.attention.wk", "model.layers.{}.self_attn.k_proj"),
    "value": Name("model.layers.{}.attention.wv", "model.layers.{}.self_attn.v_proj"),
    "attention_out": Name("model.layers.{}.attention.wo", "model.layers.{}.self_attn.o_proj"),
    "gate": Name("model.layers.{}.feed_forward.w1", "model.layers.{}.mlp.gate_proj"),
    "down": Name("model.layers.{}.feed_forward.w2", "model.layers.{}.mlp.down_proj"),
    "up": Name("model.layers.{}.feed_forward.w3", "model.layers.{}.mlp.up_proj"),
    "attention_norm": Name("model.layers.{}.attention_norm", "model.layers.{}.input_layernorm"),
    "feed_forward_norm": Name(
        "model.layers.{}.ffn_norm", "model.layers.{}.post_attention_layernorm"
    ),
    "norm": Name("model.norm_out", "model.norm"),
}
QUERY_KEY_NORMS: Names = {
    "query_norm": Name("model.layers.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm"),
    "key_norm": Name("model.layers.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm"),
}
KEYS = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
EXPERT_KEYS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
LOCAL_EXPERT_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}
# GGUF.flags: attention has biases where queries have, the feed-forward network where `up` has.
BIAS_FLAG = {"attention_bias": "blk.0.attn_q.bias"}
BIAS_FLAGS = BIAS_FLAG | {"mlp_bias": "blk.0.ffn_up.bias"}
# Of heads that are rotated in part; see infer_rotated_share.
PARTIAL_KEYS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "partial_rotary_factor": "rope.dimension_count",
}
# For models whose norm before the feed-forward network llama.cpp names as Hugging Face does.
POST_ATTENTION_NORM: Names = {
    "feed_forward_norm": dataclasses.replace(
        NAMES["feed_forward_norm"], gguf="blk.{}.post_attention_norm"
    )
}


def layer_norm_keys(field: str) -> dict[str, str]:
    """KEYS of a family with LayerNorm, whose config.json calls the epsilon `field`."""
    kept = {name: key for name, key in KEYS.items() if name != "rms_norm_eps"}
    return kept | {field: "attention.layer_norm_epsilon"}


def read_biases(fields: Fields) -> dict[str, Any]:
    """As `decoder` takes them: attention_bias is of all four matrices."""
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias, "mlp_bias": fields.flag("mlp_bias", False)}


def biases(model: Decoder) -> dict[str, Any]:
    """The inverse of `read_biases`."""
    return {"attention_bias": model.attention.out_bias, "mlp_bias": model.feed_forward.bias}


def infer_rotated_share(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """partial_rotary_factor of GGUF metadata by PARTIAL_KEYS, which has a number of dimensions."""
    head_dim = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    return {"partial_rotary_factor": (given.get("partial_rotary_factor") or head_dim) / head_dim}


@dataclass(frozen=True)
class Mixture:
    """The experts of a model whose layers have some, but for the dense ones."""

    experts: Experts
    width: int  # of each expert
    dense_layers: Collection[int] = ()


def decoder(
    *,
    architecture: str = "",
    num_layers: int,
    num_heads: int,
    n_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    norm_eps: float,
    rotary: Rotary,
    seq_length: int,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    qk_norm_by_head: bool = True,
    norms: Literal["before", "after", "both"] = "before",
    softcap: float | None = None,
    activation: Activation | None = None,
    local_rotary: Rotary | None = None,
    scale: float | None = None,
    residual_scale: float = 1.0,
    rotary_layers: Sequence[bool] = (),
    windows: Sequence[int | None] = (),
    mixture: Mixture | None = None,
    **rest: Any,
) -> Decoder:
    """A decoder with Llama blocks; `rest` are fields of Decoder.

    `windows` are the sliding windows per layer (empty: none); a window of at least seq_length masks
    nothing and counts as none. `rotary_layers`: which layers have positions (empty: all).
    `norms`: whether these are before attention and feed-forward, or behind them. `local_rotary`: of
    the layers with windows, which then keep any window (None: as of the others).
    `intermediate_size` is of dense layers.

    Without `architecture` it is qwen2 if only q, k and v have biases,
    else mistral if there are windows, else llama: MindFormers has one config class for all three.
    """
    if not architecture:
        plain = "mistral" if any(windows) else "llama"
        architecture = "qwen2" if qkv_bias and not out_bias else plain
    norm = Norm("rms", norm_eps)
    attention = Attention(
        num_heads,
        n_kv_heads,
        head_dim,
        rotary,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=norm if qk_norm else None,
        qk_norm_by_head=qk_norm_by_head,
        scale=scale,
        softcap=softcap,
    )
    feed_forward = FeedForward(intermediate_size, True, mlp_bias, activation)
    before = None if norms == "after" else norm
    after = None if norms == "before" else norm

    sparse = feed_forward
    if mixture is not None:
        sparse = dataclasses.replace(feed_forward, width=mixture.width, experts=mixture.experts)
    dense_layers = range(num_layers) if mixture is None else mixture.dense_layers

    def block(layer: int, window: int | None, rotates: bool) -> Block:
        # A window of the whole context still tells which layers have the local positions.
        masks = window is not None and (local_rotary is not None or window < seq_length)
        positions = rotary if window is None else local_rotary or rotary
        own = dataclasses.replace(
            attention, window=window if masks else None, rotary=positions if rotates else None
        )
        wide = feed_forward if layer in dense_layers else sparse
        return Block(before, own, wide, after, residual_scale)

    none, every = (None,) * num_layers, (True,) * num_layers
    blocks = tuple(map(block, range(num_layers), windows or none, rotary_layers or every))
    return Decoder(architecture, seq_length=seq_length, blocks=blocks, norm=norm, **rest)


def sizes(
    fields: Fields, *, positions: int, partial: float | None = None, rope: Fields | None = None
) -> dict[str, Any]:
    """The shared fields of config.json, as `decoder` takes them; `positions` is the default of
    max_position_embeddings, `partial` that of partial_rotary_factor (None: it must be 1); `rope`:
    see rope_from_hf."""
    activation = read_activation(fields)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.invalid("num_key_value_heads", kv_heads, f"a divisor of the {heads} heads")
    if fields.raw.get("head_dim") is None:
        head_dim = fields.head_dim(hidden, heads)
    else:
        head_dim = fields.integer("head_dim")
    if head_dim % 2:
        raise fields.invalid("head_dim", head_dim, "an even number, for the rotary embedding")
    positions = fields.integer("max_position_embeddings", default=positions)
    dims = None if partial is None else rotary_dims(fields, head_dim, partial)
    theta, scaling = rope_from_hf(
        fields, positions, dims or head_dim, rope, partial=partial is not None
    )
    # Dynamic scaling extends the context beyond the trained positions.
    if scaling is not None and scaling.type == "dynamic":
        positions = int(positions * scaling.factor)
    vocab_size = fields.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", most=MAX_LAYERS),
        "num_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "seq_length": positions,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "rotary": Rotary(theta, scaling, None if dims == head_dim else dims),
        **({} if activation in (None, "silu") else {"activation": activation}),
        **fields.tokens(vocab_size),
    }


def read_activation(fields: Fields, key: str = "hidden_act") -> Activation | None:
    """The activation that config.json names; None: it names none."""
    fields.choice(key, tuple(ACTIVATIONS))
    return ACTIVATIONS.get(fields.raw.get(key) or "")


def activation_name(function: Activation) -> str:
    return next(name for name, one in ACTIVATIONS.items() if one == function)


def changed(
    model: Decoder,
    attention: Mapping[str, Any] | None = None,
    feed_forward: Mapping[str, Any] | None = None,
    **block: Any,
) -> Decoder:
    """The model with other fields of its blocks, of their attention and of their feed-forward; a
    `norm` of theirs is the final one, too."""

    def change(one: Block) -> Block:
        return dataclasses.replace(
            one,
            attention=dataclasses.replace(one.attention, **attention or {}),
            feed_forward=dataclasses.replace(one.feed_forward, **feed_forward or {}),
            **block,
        )

    norm = block.get("norm", model.norm)
    return dataclasses.replace(model, blocks=tuple(map(change, model.blocks)), norm=norm)


def shared(model: Decoder) -> dict[str, Any]:
    """The shared fields of config.json, with keys that both transformers 4 and 5 read."""
    rotary = model.rotary or Rotary()
    scaling = rotary.scaling
    dynamic = scaling is not None and scaling.type == "dynamic"
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": activation_name(model.feed_forward.function),
        "max_position_embeddings": scaling.original_seq_length
        if scaling is not None and dynamic
        else model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rotary.theta,
        "rope_scaling": None if scaling is None else rope_scaling_to_hf(scaling),
    }


def rotated_share(model: Decoder) -> float:
    """The share of a head's dimensions that is rotated: partial_rotary_factor."""
    dims = model.rotary.dims if model.rotary else None
    return (dims or model.head_dim) / model.head_dim


ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


def rope_from_hf(
    fields: Fields, positions: int, dims: int, rope: Fields | None = None, *, partial: bool = False
) -> tuple[float, RopeScaling | None]:
    """Base (theta) and scaling of a model with `positions` position ids, of whose heads `dims`
    dimensions are rotated; `rope`: the object of rotary parameters, if it is not where most files
    have it.

    `partial`: heads may be rotated in part, see `rotary_dims`. Raises ArtifactError for an
    unsupported scaling.
    """
    rope = rope or _rope_object(fields)
    factor = _partial_factor(rope, fields)
    if factor not in (None, 1) and not partial:
        raise rope.invalid("partial_rotary_factor", factor, "1: the whole head is rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    scaling = _rope_scaling(rope, fields, positions, dims)
    if partial and scaling is not None and scaling.type == "dynamic":
        raise rope.invalid("rope_type", "dynamic", "another: heads are rotated in part")
    return theta, scaling


def rotary_dims(fields: Fields, head_dim: int, default: float) -> int:
    """The rotated dimensions of a head; `default` is that of partial_rotary_factor."""
    rope = _rope_object(fields)
    factor = _partial_factor(rope, fields)
    factor = default if factor is None else factor
    if type(factor) in (int, float) and 0 < factor <= 1:
        dims = int(head_dim * factor)
        if dims and dims % 2 == 0:
            return dims
    expected = f"a fraction of the {head_dim} of a head that is an even number"
    raise rope.invalid("partial_rotary_factor", factor, expected)


def _partial_factor(rope: Fields, fields: Fields) -> Any:
    return rope.raw.get("partial_rotary_factor", fields.raw.get("partial_rotary_factor"))


def _rope_object(fields: Fields) -> Fields:
    """The object of rotary parameters: `rope_parameters` of transformers 5 or `rope_scaling`."""
    # transformers 5 also lets a legacy rope_scaling take precedence.
    old, new = fields.raw.get("rope_scaling"), fields.raw.get("rope_parameters")
    key, value = ("rope_scaling", old) if old else ("rope_parameters", new)
    rope = fields.section(key)
    nested = [name for name, item in (value or {}).items() if isinstance(item, dict)]
    if nested:
        raise fields.invalid(key, nested, "one set of parameters, the same for all layers")
    return rope


def _rope_scaling(rope: Fields, fields: Fields, positions: int, dims: int) -> RopeScaling | None:
    key, kind = rope.get("rope_type", "type")
    if kind in (None, "default"):
        return None
    if kind not in ROPE_TYPES:
        raise rope.invalid(key, kind, f"default, {', '.join(ROPE_TYPES)}")
    original = positions
    if kind in ("llama3", "yarn", "longrope"):
        outer = fields.integer("original_max_position_embeddings", default=positions)
        inner = rope.integer("original_max_position_embeddings", default=positions)
        # The top-level value takes precedence over the nested one, as in transformers.
        original = inner if fields.raw.get("original_max_position_embeddings") is None else outer
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:
            raise rope.invalid("high_freq_factor", high, f"low_freq_factor = {low} or more")
        return RopeScaling(
            "llama3", _factor(rope), original, low_freq_factor=low, high_freq_factor=high
        )
    if kind in ("yarn", "longrope"):
        given = rope.raw.get("factor") is not None
        factor = _factor(rope) if given else positions / original
    if kind == "longrope":
        return RopeScaling(
            "longrope",
            factor,
            original,
            attention_factor=rope.optional_number("attention_factor"),
            short_factor=rope.numbers("short_factor", dims // 2),
            long_factor=rope.numbers("long_factor", dims // 2),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    return RopeScaling(kind, _factor(rope), original)


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if not 1 <= factor <= 1024:
        raise rope.invalid("factor", factor, "a number from 1 to 1024")
    return factor


def rope_scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` object that `rope_from_hf` reads as `scaling`."""
    raw: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type in ("llama3", "yarn", "longrope"):
        raw["original_max_position_embeddings"] = scaling.original_seq_length
    if scaling.type == "llama3":
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.type == "yarn":
        raw |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if scaling.type == "longrope":
        raw |= {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    if scaling.type in ("yarn", "longrope"):
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        raw |= {
            name: getattr(scaling, name) for name in optional if getattr(scaling, name) is not None
        }
    return raw
