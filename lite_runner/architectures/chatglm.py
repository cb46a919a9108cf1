"""ChatGLM2, ChatGLM3, CodeGeeX2 and GLM-4 in the form of their first release: a Llama with rotary
positions on half of each head, and q, k and v, and gate and up, fused."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any, Literal

from lite_runner.architectures import (
    GGUF,
    Architecture,
    MindFormers,
    Rows,
    llama_like,
    row_order,
    shared_settings,
    stacked,
)
from lite_runner.architectures.fields import KERNEL, MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names, Parameter
from lite_runner.architectures.settings import PREFIX, DecoderSettings, Error, Translation, error
from lite_runner.architectures.spec import Decoder, Norm, Rotary
from lite_runner.records import Count, Positive, dataclass

BASE = 10000.0  # of the frequencies, times rope_ratio
_OURS = "encoder.layers.{}"
_LAYER = f"transformer.{_OURS}"
_QKV = f"{_LAYER}.self_attention.query_key_value"
_GATE_UP = f"{_LAYER}.mlp.dense_h_to_4h"
_OUT, _DOWN = "self_attention.dense", "mlp.dense_4h_to_h"
_EMBEDDING, _NORM = "transformer.embedding", "encoder.final_layernorm"


def _same(name: str) -> Name:
    """A name that MindFormers and Hugging Face share."""
    return Name(name, f"transformer.{name}", stored=f"transformer.{name}")


def _part(name: str, stored: str, part: int) -> Name:
    """The name of a part of the `stored` tensor, which both fuse."""
    return Name(name, stored, part, stored=stored)


NAMES: Names = {
    "embedding": Name(
        "embedding.embedding_weight",
        f"{_EMBEDDING}.word_embeddings",
        stored=f"{_EMBEDDING}.embedding_weight",
    ),
    "attention_norm": _same(f"{_OURS}.input_layernorm"),
    "query": _part(f"{_OURS}.self_attention.query", _QKV, 0),
    "key": _part(f"{_OURS}.self_attention.key", _QKV, 1),
    "value": _part(f"{_OURS}.self_attention.value", _QKV, 2),
    "attention_out": _same(f"{_OURS}.{_OUT}"),
    "feed_forward_norm": _same(f"{_OURS}.post_attention_layernorm"),
    "gate": _part(f"{_OURS}.mlp.gate", _GATE_UP, 0),
    "up": _part(f"{_OURS}.mlp.up", _GATE_UP, 1),
    "down": _same(f"{_OURS}.{_DOWN}"),
    "norm": _same(_NORM),
    "head": Name("lm_head", "transformer.output_layer", stored="transformer.output_layer"),
}


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Without multi-query attention q, k and v of each head are adjacent."""
    by_head = model.n_kv_heads == model.num_heads and parameter.role in ("query", "key", "value")
    return row_order.interleaved(row_order.by_head if by_head else stacked)(parameter, model)


def decoder(
    *,
    rope_ratio: float,
    head_dim: int,
    norm_eps: float,
    qkv_bias: bool,
    add_bias_linear: bool = False,
    rmsnorm: bool = True,
    post_layer_norm: bool = True,
    **sizes: Any,
) -> Decoder:
    """See llama_like.decoder; half of each head is rotated. `add_bias_linear`: every linear layer
    but the head has a bias; without `rmsnorm` norms are LayerNorms; `post_layer_norm`: there is a
    norm before the head."""
    model = llama_like.decoder(
        architecture="chatglm",
        rotary=Rotary(BASE * rope_ratio, dims=head_dim // 2),
        head_dim=head_dim,
        norm_eps=norm_eps,
        qkv_bias=qkv_bias or add_bias_linear,
        out_bias=add_bias_linear,
        mlp_bias=add_bias_linear,
        **sizes,
    )
    norm = Norm("rms" if rmsnorm else "layer", norm_eps)
    blocks = tuple(dataclasses.replace(block, norm=norm) for block in model.blocks)
    return dataclasses.replace(model, blocks=blocks, norm=norm if post_layer_norm else None)


def read(fields: Fields) -> Decoder:
    fields.neutral(
        apply_residual_connection_post_layernorm=False,
        interleaved_qkv=False,
        original_rope=True,
        pre_seq_len=0,
        prefix_projection=False,
        quantization_bit=0,
        tie_word_embeddings=False,
    )
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    vocab_size = fields.integer("padded_vocab_size", "vocab_size")
    head_dim = _head_dim(fields, hidden, heads)
    groups = fields.integer("multi_query_group_num", default=1)
    grouped = fields.flag("multi_query_attention", False)
    if grouped and (heads % groups or groups == heads):
        expected = f"a divisor of the {heads} heads, and fewer"
        raise fields.invalid("multi_query_group_num", groups, expected)
    return decoder(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=fields.integer("num_layers", "num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        n_kv_heads=groups if grouped else heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("ffn_hidden_size"),
        seq_length=fields.integer("seq_length", default=2048),
        norm_eps=fields.number("layernorm_epsilon", 1e-5),
        rope_ratio=fields.number("rope_ratio", 1.0),
        qkv_bias=fields.flag("add_qkv_bias", False),
        add_bias_linear=fields.flag("add_bias_linear", False),
        rmsnorm=fields.flag("rmsnorm", True),
        post_layer_norm=fields.flag("post_layer_norm", True),
        tie_word_embeddings=False,
        **fields.tokens(vocab_size),
    )


def _head_dim(fields: Fields, hidden: int, heads: int) -> int:
    if fields.raw.get("kv_channels") is None:
        head_dim = fields.head_dim(hidden, heads)
    else:
        head_dim = fields.integer("kv_channels")
    if head_dim % 4:
        raise fields.invalid("kv_channels", head_dim, "a multiple of 4: half of it is rotated")
    return head_dim


def write(model: Decoder) -> dict[str, Any]:
    """config.json, as its repositories have it; transformers reads it with their code only."""
    shared = settings(model)
    return {
        **{key: value for key, value in shared.items() if key != "qkv_has_bias"},
        "architectures": ["ChatGLMModel"],
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "padded_vocab_size": model.vocab_size,
        "seq_length": model.seq_length,
        "add_qkv_bias": model.attention.qkv_bias,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "original_rope": True,
    }


@dataclass(frozen=True, kw_only=True)
class ChatGLM2Settings(DecoderSettings):
    """Settings of ChatGLM2, ChatGLM3 and GLM-4 in their first form."""

    type: Literal["ChatGLM2Config"] = "ChatGLM2Config"
    kv_channels: Count  # head size
    multi_query_attention: bool  # false: as many key/value heads as heads
    multi_query_group_num: Count  # key/value heads
    ffn_hidden_size: Count
    layernorm_epsilon: Positive
    rope_ratio: Positive  # times 10000: base of the rotary frequencies
    qkv_has_bias: bool
    add_bias_linear: bool = False  # all linear layers but the head have a bias
    rmsnorm: bool = True  # false: LayerNorm
    post_layer_norm: bool = True  # a norm before the head

    def errors(self) -> Iterator[Error]:
        heads, groups = self.num_heads, self.multi_query_group_num
        if self.multi_query_attention and (heads % groups or heads == groups):
            yield error(
                f"multi_query_group_num: got {groups}, expected a divisor of num_heads={heads},"
                " and fewer; multi_query_attention=false has as many",
                *("num_heads", "multi_query_group_num"),
            )
        if self.kv_channels % 4:
            yield error(
                f"kv_channels: got {self.kv_channels}, expected a multiple of 4: half of a head is"
                " rotated",
                "kv_channels",
            )


def settings(model: Decoder) -> dict[str, Any]:
    """Settings of MindFormers' ChatGLM2Config besides the shared ones."""
    rotary = model.rotary or Rotary()
    return {
        "kv_channels": model.head_dim,
        "multi_query_attention": model.n_kv_heads != model.num_heads,
        "multi_query_group_num": model.n_kv_heads,
        "ffn_hidden_size": model.intermediate_size,
        "layernorm_epsilon": model.norm_eps,
        "rope_ratio": rotary.theta / BASE,
        "qkv_has_bias": model.attention.qkv_bias,
        "add_bias_linear": model.attention.out_bias,
        "rmsnorm": model.blocks[0].norm == Norm("rms", model.norm_eps),
        "post_layer_norm": model.norm is not None,
    }


def from_settings(given: Mapping[str, Any]) -> Decoder:
    groups = given["multi_query_group_num"] if given["multi_query_attention"] else None
    return decoder(
        **shared_settings(given),
        n_kv_heads=groups or given["num_heads"],
        head_dim=given["kv_channels"],
        intermediate_size=given["ffn_hidden_size"],
        norm_eps=given["layernorm_epsilon"],
        rope_ratio=given["rope_ratio"],
        qkv_bias=given["qkv_has_bias"],
        **{name: given[name] for name in ("add_bias_linear", "rmsnorm", "post_layer_norm")},
    )


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The base of the frequencies as a ratio; biases and groups. transformers' `glm` is written as
    chatglm with q, k and v apart."""
    kv_heads = given.get("multi_query_group_num")
    if "blk.0.attn_q.weight" in tensors:
        return {
            "model_type": "glm",
            "num_key_value_heads": kv_heads,
            "head_dim": given.get("kv_channels"),
            "rms_norm_eps": given.get("layernorm_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
        }
    return {
        "multi_query_attention": kv_heads is not None and kv_heads != given["num_attention_heads"],
        "add_qkv_bias": "blk.0.attn_qkv.bias" in tensors,
        "rope_ratio": (given.get("rope_theta") or BASE) / BASE,
    }


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The bias of q, k and v has another name here."""
    given = raw["model"]["model_config"]
    if given.get("add_qkv_bias") is not None:
        result.assignments[f"{PREFIX}qkv_has_bias"] = given["add_qkv_bias"]


CHATGLM = Architecture(
    "chatglm",
    read,
    NAMES,
    write,
    MindFormers(
        ChatGLM2Settings,
        "ChatGLM2ForConditionalGeneration",
        "common",
        settings,
        from_settings,
        sizes={
            "kv_channels": "head_dim",
            "multi_query_group_num": "n_kv_heads",
            "ffn_hidden_size": "intermediate_size",
        },
        model="glm2_6b",
        also=("ChatGLM2WithPtuning2",),
        translated=frozenset({"add_qkv_bias"}),
        translate=translate,
    ),
    GGUF(
        {
            "num_attention_heads": "attention.head_count",
            "multi_query_group_num": "attention.head_count_kv",
            "kv_channels": "attention.key_length",
            "ffn_hidden_size": "feed_forward_length",
            "seq_length": "context_length",
            "layernorm_epsilon": "attention.layer_norm_rms_epsilon",
            "rope_theta": "rope.freq_base",
        },
        permuted=True,
        infer=infer_from_gguf,
    ),
    stored_rows=stored_rows,
    no_effect=dict.fromkeys(
        (
            *("apply_query_key_layer_scaling", "attention_softmax_in_fp32"),
            *("bias_dropout_fusion", "fp32_residual_connection"),
        ),
        KERNEL,
    ),
)
