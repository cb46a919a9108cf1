"""GPT-2: learned position embeddings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, shared_settings
from lite_runner.architectures.fields import CLASSES, KERNEL, MAX_LAYERS, TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import PREFIX, DecoderSettings, Translation
from lite_runner.architectures.spec import Activation, Attention, Block, Decoder, FeedForward, Norm
from lite_runner.errors import ConfigError, show
from lite_runner.records import Count, Positive, dataclass

QUICK_GELU: Activation = "quick_gelu"
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # aliases of the tanh approximation
_ATTENTION, _BLOCK = "backbone.blocks.{}.attention", "transformer.h.{}"

NAMES: Names = {
    "embedding": Name("backbone.embedding.word_embedding.embedding_table", "transformer.wte"),
    "positions": Name("backbone.embedding.position_embedding.embedding_table", "transformer.wpe"),
    "attention_norm": Name("backbone.blocks.{}.layernorm1", f"{_BLOCK}.ln_1"),
    "query": Name(f"{_ATTENTION}.dense1", f"{_BLOCK}.attn.c_attn", 0),
    "key": Name(f"{_ATTENTION}.dense2", f"{_BLOCK}.attn.c_attn", 1),
    "value": Name(f"{_ATTENTION}.dense3", f"{_BLOCK}.attn.c_attn", 2),
    "attention_out": Name(f"{_ATTENTION}.projection", f"{_BLOCK}.attn.c_proj", transposed=True),
    "up": Name("backbone.blocks.{}.output.mapping", f"{_BLOCK}.mlp.c_fc", transposed=True),
    "down": Name("backbone.blocks.{}.output.projection", f"{_BLOCK}.mlp.c_proj", transposed=True),
    "feed_forward_norm": Name("backbone.blocks.{}.layernorm2", f"{_BLOCK}.ln_2"),
    "norm": Name("backbone.layernorm", "transformer.ln_f"),
}
KEYS = {
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "n_inner": "feed_forward_length",
    "seq_length": "context_length",
}


def decoder(
    *,
    architecture: str = "gpt2",
    num_layers: int,
    num_heads: int,
    head_dim: int,
    intermediate_size: int,
    norm_eps: float,
    alibi: bool = False,
    activation: Activation | None = None,
    normed_residual: float | None = None,
    **rest: Any,
) -> Decoder:
    """A decoder with the blocks of GPT-2 and BLOOM; `rest` are fields of Decoder."""
    norm = Norm("layer", norm_eps)
    attention = Attention(num_heads, num_heads, head_dim, alibi=alibi, qkv_bias=True, out_bias=True)
    feed_forward = FeedForward(intermediate_size, False, True, activation)
    block = Block(norm, attention, feed_forward, normed_residual=normed_residual)
    rest.setdefault("learned_positions", not alibi)
    return Decoder(architecture, blocks=(block,) * num_layers, norm=norm, **rest)


def read(fields: Fields) -> Decoder:
    hidden = fields.integer("hidden_size", "n_embd")
    model = decoder(
        **sizes(fields, hidden),
        intermediate_size=fields.integer("n_inner", default=4 * hidden),
        activation=read_activation(fields, "activation_function"),
        seq_length=fields.integer("max_position_embeddings", "n_positions", "n_ctx", default=1024),
    )
    scaled = fields.flag("scale_attn_weights", True)
    by_layer = fields.flag("scale_attn_by_inverse_layer_idx", False)
    if scaled and not by_layer:
        return model
    scale = model.head_dim**-0.5 if scaled else 1.0
    blocks = (
        dataclasses.replace(
            block,
            attention=dataclasses.replace(
                block.attention, scale=scale / (layer + 1) if by_layer else scale
            ),
        )
        for layer, block in enumerate(model.blocks)
    )
    return dataclasses.replace(model, blocks=tuple(blocks))


def read_activation(fields: Fields, key: str) -> Activation | None:
    """The activation that config.json names; None: the tanh form of GELU."""
    fields.choice(key, (*TANH_GELU, QUICK_GELU, "gelu", "relu"))
    named: dict[str, Activation] = {
        "quick_gelu": "quick_gelu",
        "gelu": "gelu_exact",
        "relu": "relu",
    }
    return named.get(fields.raw.get(key) or "")


def sizes(fields: Fields, hidden: int) -> dict[str, Any]:
    """The fields of config.json shared by BLOOM and GPT-2, as `decoder` takes them.

    Where a size has two keys, the one that transformers prefers comes first.
    """
    heads = fields.integer("num_attention_heads", "n_head")
    vocab_size = fields.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": fields.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS),
        "num_heads": heads,
        "head_dim": fields.head_dim(hidden, heads),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        **fields.tokens(vocab_size),
    }


def write(model: Decoder) -> dict[str, Any]:
    """config.json, with keys that both transformers 4 and 5 read."""
    first = model.attention.scale
    scaled = first is None or first != 1.0
    by_layer = any(block.attention.scale != first for block in model.blocks)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.intermediate_size,
        "n_positions": model.seq_length,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": ACTIVATIONS[model.feed_forward.function],
        "scale_attn_weights": scaled,
        "scale_attn_by_inverse_layer_idx": by_layer,
    }


# transformers' names.
ACTIVATIONS: dict[Activation, str] = {
    "gelu": "gelu_new",
    "gelu_exact": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LayerNormSettings(DecoderSettings):
    """Settings of BLOOM and GPT-2, which have the same shape."""

    expand_ratio: Count  # feed-forward width / hidden_size
    layernorm_epsilon: Positive
    hidden_act: Literal["gelu", "fast_gelu", "gelu_exact", "relu"]  # gelu: the tanh form


@dataclass(frozen=True, kw_only=True)
class GPT2Settings(LayerNormSettings):
    """Settings of GPT-2."""

    type: Literal["GPT2Config"] = "GPT2Config"


def settings(model: Decoder) -> dict[str, Any]:
    """Settings of MindFormers' GPT2Config and BloomConfig besides the shared ones; ConfigError for
    what these have no words for."""
    first = model.blocks[0]
    if first.normed_residual is not None or first.attention.scale is not None:
        raise ConfigError(
            f"{model.architecture}: MindFormers' config cannot express its residual connections,"
            " or how its scores are scaled",
            "backend=native",
        )
    return {
        "expand_ratio": model.intermediate_size // model.hidden_size,
        "layernorm_epsilon": model.norm_eps,
        "hidden_act": "fast_gelu" if quick(model) else model.feed_forward.function,
    }


def quick(model: Decoder) -> bool:
    """True where the activation is MindSpore's fast_gelu, which transformers calls quick_gelu."""
    return model.feed_forward.activation == QUICK_GELU


def sizes_of_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings`, as `decoder` takes it."""
    return shared_settings(given) | {
        "head_dim": given["hidden_size"] // given["num_heads"],
        "intermediate_size": given["expand_ratio"] * given["hidden_size"],
        "norm_eps": given["layernorm_epsilon"],
        "activation": OF_SETTINGS.get(given["hidden_act"]),
    }


OF_SETTINGS: dict[str, Activation] = {
    "fast_gelu": "quick_gelu",
    "gelu_exact": "gelu_exact",
    "relu": "relu",
}


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """Positions have weights: max_position_embeddings must equal seq_length."""
    given = raw["model"]["model_config"]
    most, length = given.get("max_position_embeddings"), given.get("seq_length")
    length = defaults.get("seq_length") if length is None else length
    if most not in (None, length):
        result.errors.append(
            f"{PREFIX}max_position_embeddings: got {show(most)}, expected the seq_length of"
            f" {show(length)}: the model has a weight for each position"
        )


GPT2 = Architecture(
    "gpt2",
    read,
    NAMES,
    write,
    MindFormers(
        GPT2Settings,
        "GPT2LMHeadModel",
        "common",
        settings,
        lambda given: decoder(**sizes_of_settings(given)),
        sizes={"expand_ratio": "expand_ratio"},
        model="gpt2",
        translated=frozenset({"max_position_embeddings"}),
        translate=translate,
    ),
    GGUF(KEYS),
    no_effect={
        "attn_pdrop": TRAINING,
        "embd_pdrop": TRAINING,
        "resid_pdrop": TRAINING,
        "reorder_and_upcast_attn": KERNEL,
        "summary_activation": CLASSES,
        "summary_first_dropout": CLASSES,
        "summary_proj_to_labels": CLASSES,
        "summary_type": CLASSES,
        "summary_use_proj": CLASSES,
    },
    conv1d=True,
    always_tied=True,
)
