"""iFlytekSpark: a Llama with LayerNorm, a bias of every matrix, fused q, k and v, and tanh-GELU in
place of SiLU. MindFormers alone has its code, whose names config.json has here, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lite_runner.architectures import (
    Architecture,
    MindFormers,
    llama_like,
    shared_fields,
    shared_names,
    shared_settings,
)
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names, Role
from lite_runner.architectures.settings import PREFIX, DecoderSettings, Translation
from lite_runner.architectures.spec import Decoder, Norm, Rotary
from lite_runner.errors import show
from lite_runner.records import Count, Positive, dataclass

THETA = 1e6  # of the rotary positions
_LAYER = "transformer.layers.{}"
_MODULES: dict[Role, str] = {
    "attention_norm": "layer_norm",
    "attention_out": "attention.out_proj",
    "gate": "mlp.fc0",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "feed_forward_norm": "final_layer_norm",
}


def _name(ours: str, theirs: str, part: int | None = None) -> Name:
    """MindFormers saves everything below `transformer.`, of which `canonical_name` takes one."""
    return Name(ours, theirs, part, stored=f"transformer.{theirs}")


_TABLE = "embedding.word_embeddings.embedding_table"
_FUSED = f"{_LAYER}.attention.q_k_v_proj"
NAMES: Names = {
    "embedding": _name(_TABLE, _TABLE),
    "query": _name("layers.{}.attention.q_proj", _FUSED, 0),
    "key": _name("layers.{}.attention.k_proj", _FUSED, 1),
    "value": _name("layers.{}.attention.v_proj", _FUSED, 2),
    **{role: _name(f"layers.{{}}.{one}", f"{_LAYER}.{one}") for role, one in _MODULES.items()},
    "norm": _name("layernorm", "transformer.layernorm"),
}


@dataclass(frozen=True, kw_only=True)
class IFlytekSparkSettings(DecoderSettings):
    """Settings of iFlytekSpark."""

    type: Literal["IFlytekSparkConfig"] = "IFlytekSparkConfig"
    ffn_hidden_size: Count  # of gate and up together
    layernorm_epsilon: Positive
    sparse_local_size: Count  # latest tokens that one sees, itself among them


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """From the settings of MindFormers' class."""
    model = llama_like.decoder(
        architecture="iflytekspark",
        **shared_settings(given),
        n_kv_heads=given["num_heads"],
        head_dim=given["hidden_size"] // given["num_heads"],
        intermediate_size=given["ffn_hidden_size"] // 2,
        norm_eps=given["layernorm_epsilon"],
        rotary=Rotary(THETA),
        windows=(given["sparse_local_size"],) * given["num_layers"],
        activation="gelu",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    )
    return llama_like.changed(model, norm=Norm("layer", model.norm_eps))


def settings(model: Decoder) -> dict[str, Any]:
    """The inverse of `from_settings`, besides the shared ones."""
    return {
        "ffn_hidden_size": 2 * model.intermediate_size,
        "layernorm_epsilon": model.norm_eps,
        "sparse_local_size": model.attention.window or model.seq_length,
    }


def read(fields: Fields) -> Decoder:
    fields.neutral(post_layernorm_residual=False, apply_residual_connection_post_layernorm=False)
    own = {
        "ffn_hidden_size": fields.integer("ffn_hidden_size"),
        "layernorm_epsilon": fields.number("layernorm_epsilon", 1e-5),
        "sparse_local_size": fields.integer("sparse_local_size", default=8192),
    }
    return from_settings(shared_fields(fields) | own)


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """compute_type is compute_dtype; the penalty, which grows by each repetition, is off."""
    given = raw["model"]["model_config"]
    if given.get("compute_type") is not None:
        result.assignments[f"{PREFIX}compute_dtype"] = given["compute_type"]
    if given.get("repetition_penalty") not in (None, 1, 1.0):
        result.errors.append(
            f"{PREFIX}repetition_penalty: got {show(given['repetition_penalty'])}, expected 1.0:"
            " this family's grows by each repetition; the run's repetition_penalty= is another"
        )


IFLYTEKSPARK = Architecture(
    "iflytekspark",
    read,
    NAMES,
    lambda model: shared_names(model) | settings(model),
    MindFormers(
        IFlytekSparkSettings,
        "IFlytekSparkModelForCasualLM",
        "llama",
        settings,
        from_settings,
        sizes={"ffn_hidden_size": "ffn_hidden_size"},
        model="iflytekspark_13b",
        translated=frozenset({"compute_type"}),
        translate=translate,
        unread=frozenset(
            (
                *("compute_type", "dropout_rate", "enable_offload", "eod_reset", "expert_num"),
                *("flash_attention_recompute", "is_lite_infer", "is_reward_model", "seq_parallel"),
                "repetition_penalty_increase",
            )
        ),
    ),
    always_tied=True,
    spelling="breaks",
)
