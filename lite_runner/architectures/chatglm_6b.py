"""ChatGLM-6B: a prefix LM with two-dimensional positions, whose residual connections start from
normed values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lite_runner.architectures import Architecture, MindFormers, row_order, shared_settings
from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Name, Names, Parameter
from lite_runner.architectures.settings import PREFIX, DecoderSettings, Error, Translation, error
from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    Norm,
    Prefix,
    Rotary,
)
from lite_runner.records import Count, Index, Positive, dataclass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DEFAULTS = {  # of the config class in the model's repository, which are its first release's
    "vocab_size": 150528,
    "hidden_size": 4096,
    "inner_hidden_size": 16384,
    "num_layers": 28,
    "num_attention_heads": 32,
    "max_sequence_length": 2048,
    "layernorm_epsilon": 1e-5,
    "bos_token_id": 150004,
    "eos_token_id": 150005,
    "pad_token_id": 0,
    "gmask_token_id": 150001,
    "mask_token_id": 150000,
}
_LAYER = "layers.{}"
_QKV = f"transformer.{_LAYER}.attention.query_key_value"


def _same(name: str) -> Name:
    """A name that MindFormers and Hugging Face share."""
    return Name(name, f"transformer.{name}", stored=f"transformer.{name}")


def _part(name: str, part: int) -> Name:
    return Name(f"{_LAYER}.attention.{name}", _QKV, part, stored=_QKV)


NAMES: Names = {
    "embedding": Name(
        "word_embeddings.embedding_table",
        "transformer.word_embeddings",
        stored="transformer.word_embeddings.embedding_table",
    ),
    "attention_norm": _same(f"{_LAYER}.input_layernorm"),
    "query": _part("query", 0),
    "key": _part("key", 1),
    "value": _part("value", 2),
    "attention_out": _same(f"{_LAYER}.attention.dense"),
    "feed_forward_norm": _same(f"{_LAYER}.post_attention_layernorm"),
    "up": _same(f"{_LAYER}.mlp.dense_h_to_4h"),
    "down": _same(f"{_LAYER}.mlp.dense_4h_to_h"),
    "norm": _same("final_layernorm"),
}


def stored_rows(parameter: Parameter, model: Decoder) -> NDArray[np.int64] | None:
    """q, k and v of each head. Its halves, which checkpoints rotate each by itself, become one
    rotation: the first parts of both, then the second parts."""
    rows = row_order.by_head(parameter, model)
    if rows is None or parameter.role == "value":
        return rows
    return rows.reshape(model.num_heads, 2, 2, -1).swapaxes(1, 2).reshape(-1)


def decoder(
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    intermediate_size: int,
    norm_eps: float,
    end_token_id: int,
    mask_token_ids: tuple[int, ...],
    **rest: Any,
) -> Decoder:
    """`end_token_id` and `mask_token_ids`: see Prefix; `rest` are fields of Decoder."""
    norm = Norm("layer", norm_eps)
    rotary = Rotary(two_dimensional=True)
    attention = Attention(num_heads, num_heads, head_dim, rotary, qkv_bias=True, out_bias=True)
    feed_forward = FeedForward(intermediate_size, gated=False, bias=True)
    # Hugging Face's code takes the published model's 28 layers, whatever config.json says.
    block = Block(norm, attention, feed_forward, normed_residual=(2 * num_layers) ** 0.5)
    prefix = Prefix(end_token_id, mask_token_ids)
    blocks = (block,) * num_layers
    return Decoder("chatglm_6b", blocks=blocks, norm=norm, prefix=prefix, **rest)


def read(fields: Fields) -> Decoder:
    fields.neutral(
        position_encoding_2d=True, pre_seq_len=0, prefix_projection=False, quantization_bit=0
    )
    fields = fields.with_defaults(**_DEFAULTS)
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    head_dim = fields.head_dim(hidden, heads)
    if head_dim % 4:
        raise fields.invalid("hidden_size", hidden, f"{heads} heads of a multiple of 4")
    vocab_size = fields.integer("vocab_size")
    tokens = fields.tokens(vocab_size)
    if tokens["bos_token_id"] is None:
        raise fields.invalid("bos_token_id", None, "a token id: sop, which ends a prompt's prefix")
    masks = (
        fields.integer(key, most=vocab_size - 1) for key in ("gmask_token_id", "mask_token_id")
    )
    return decoder(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=fields.integer("num_layers", "num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("inner_hidden_size"),
        seq_length=fields.integer("max_sequence_length"),
        norm_eps=fields.number("layernorm_epsilon"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        end_token_id=tokens["bos_token_id"],
        mask_token_ids=tuple(masks),
        **tokens,
    )


def write(model: Decoder) -> dict[str, Any]:
    """config.json, as the model's own code reads it; transformers has no other."""
    return _masks(model) | {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "hidden_size": model.hidden_size,
        "inner_hidden_size": model.intermediate_size,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_sequence_length": model.seq_length,
        "layernorm_epsilon": model.norm_eps,
        "position_encoding_2d": True,
    }


@dataclass(frozen=True, kw_only=True)
class GLMSettings(DecoderSettings):
    """Settings of ChatGLM-6B."""

    type: Literal["GLMConfig"] = "GLMConfig"
    bos_token_id: Index  # sop, which ends a prompt's prefix
    inner_hidden_size: Count  # feed-forward width
    layernorm_epsilon: Positive
    gmask_token_id: Index  # stands for the text that is generated
    mask_token_id: Index  # the same in a prompt without the other

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if (head_dim := self.hidden_size // self.num_heads) % 4:
            yield error(
                f"num_heads: got {self.num_heads}, expected heads of a multiple of 4, not of"
                f" {head_dim}: each half of them turns pairs",
                *("hidden_size", "num_heads"),
            )


def settings(model: Decoder) -> dict[str, Any]:
    """Settings of MindFormers' GLMConfig besides the shared ones."""
    return _masks(model) | {
        "inner_hidden_size": model.intermediate_size,
        "layernorm_epsilon": model.norm_eps,
        "position_encoding_2d": True,
    }


def _masks(model: Decoder) -> dict[str, int]:
    assert model.prefix is not None
    gmask, mask = model.prefix.mask_token_ids
    return {"gmask_token_id": gmask, "mask_token_id": mask}


def from_settings(given: Mapping[str, Any]) -> Decoder:
    return decoder(
        **shared_settings(given),
        head_dim=given["hidden_size"] // given["num_heads"],
        intermediate_size=given["inner_hidden_size"],
        norm_eps=given["layernorm_epsilon"],
        end_token_id=given["bos_token_id"],
        mask_token_ids=(given["gmask_token_id"], given["mask_token_id"]),
    )


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """A ChatGLM2's yaml has the key too, and there it is of its training."""
    given = raw["model"]["model_config"]
    if "gmask_token_id" in given:
        result.assignments[f"{PREFIX}gmask_token_id"] = given["gmask_token_id"]


CHATGLM_6B = Architecture(
    "chatglm_6b",
    read,
    NAMES,
    write,
    MindFormers(
        GLMSettings,
        "GLMForPreTraining",
        "common",
        settings,
        from_settings,
        sizes={"inner_hidden_size": "intermediate_size"},
        model="glm_6b",
        translated=frozenset({"gmask_token_id"}),
        translate=translate,
        also=("GLMChatModel",),
    ),
    stored_rows=stored_rows,
)
