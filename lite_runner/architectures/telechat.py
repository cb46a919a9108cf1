"""TeleChat and TeleChat2: a Llama whose last matrices of attention and of feed-forward have biases,
in BLOOM's names, and in MindFormers with experts, too; TeleChat3: a Llama."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lite_runner.architectures import Architecture, MindFormers, Rows, experts, llama, llama_like
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.llama_like import Mixture
from lite_runner.architectures.naming import Name, Names, Parameter
from lite_runner.architectures.settings import PREFIX, Error, Translation, error, network_of
from lite_runner.architectures.spec import Decoder, Experts, Rotary
from lite_runner.records import Count, Index, dataclass

_OURS, _LAYER = "model.layers.{}", "transformer.h.{}"
_KV, _STORED = f"{_LAYER}.self_attention.key_value", f"{_OURS}.attention.wk_v"
_EXPERTS = experts.names(
    ("feed_forward.router.dense", "mlp.router"),
    ("feed_forward.ffn", "mlp.local_experts"),
    ("gate_proj", "down_proj", "up_proj"),
)
_LLAMA: Names = {**llama_like.NAMES, **_EXPERTS}
NAMES: Names = {
    **{
        role: dataclasses.replace(
            name, hugging_face=name.hugging_face.replace("model.layers.{}", _LAYER)
        )
        for role, name in _LLAMA.items()
    },
    "embedding": Name("model.tok_embeddings.embedding_weight", "transformer.word_embeddings"),
    "query": Name(f"{_OURS}.attention.wq", f"{_LAYER}.self_attention.query"),
    "key": Name(f"{_OURS}.attention.wk", _KV, 1, stored=_STORED),
    "value": Name(f"{_OURS}.attention.wv", _KV, 2, stored=_STORED),
    "attention_out": Name(f"{_OURS}.attention.wo", f"{_LAYER}.self_attention.dense"),
    "norm": Name("model.norm_out", "transformer.ln_f"),
}


def read(fields: Fields) -> Decoder:
    """From config.json. Its context is that of the training: behind it the published code scales
    rotations by the length."""
    fields.neutral(
        apply_residual_connection_post_layernorm=False, embed_layernorm=False, semi_causal=False
    )
    hidden, heads = fields.integer("hidden_size"), fields.integer("n_head", "num_attention_heads")
    seen = fields.integer("seq_length", default=8192)
    trained = fields.integer("training_seqlen", default=seen)
    head_dim = fields.head_dim(hidden, heads)
    # The base is that of a text as long as those of the training.
    doublings = math.ceil(math.log2(trained / fields.integer("base_seqlen", default=8192)) + 1)
    growth = max(2**doublings - 1, 1)
    same = fields.with_values(
        num_attention_heads=heads,
        num_hidden_layers=fields.integer("n_layer", "num_hidden_layers"),
        intermediate_size=fields.integer("ffn_hidden_size", "intermediate_size"),
        max_position_embeddings=trained,
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        rope_theta=10000.0 * growth ** (head_dim / (head_dim - 2)),
        hidden_act="silu",
    )
    return decoder(out_bias=True, **llama_like.sizes(same, positions=trained))


def decoder(**sizes: Any) -> Decoder:
    model = llama_like.decoder(architecture="telechat", **sizes)
    return llama_like.changed(model, feed_forward={"down_bias": True})


def write(model: Decoder) -> dict[str, Any]:
    """config.json, with the base that rotations have now as that of another text length."""
    growth = ((model.rotary or Rotary()).theta / 10000.0) ** (1 - 2 / model.head_dim)
    base = model.seq_length / 2 ** (math.log2(round(growth) + 1) - 1)
    return {
        "architectures": ["TelechatForCausalLM"],
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "num_key_value_heads": model.n_kv_heads,
        "ffn_hidden_size": model.intermediate_size,
        "layer_norm_epsilon": model.norm_eps,
        "seq_length": model.seq_length,
        "training_seqlen": model.seq_length,
        "base_seqlen": round(base),
    }


# MindFormers' names, and ours.
_OF_EXPERTS = experts.MOE_NAMES | {"moe_intermediate_size": "moe_intermediate_size"}


def settings(model: Decoder) -> dict[str, Any]:
    found = llama.settings(model)
    if model.sparse is not None:
        given = experts.to_settings(model)  # with others, which TelechatConfig does not have
        found |= {key: given[key] for key in _OF_EXPERTS.values()}
    return found


def from_settings(given: Mapping[str, Any]) -> Decoder:
    mixture = None
    if given["num_experts"]:
        chosen = Experts(given["num_experts"], given["num_experts_per_tok"])
        mixture = Mixture(chosen, given["moe_intermediate_size"] or given["intermediate_size"])
    return decoder(mixture=mixture, **llama.sizes_of_settings(given))


@dataclass(frozen=True, kw_only=True)
class TelechatSettings(llama.LlamaLikeSettings):
    """Settings of TeleChat and TeleChat2."""

    type: Literal["TelechatConfig"] = "TelechatConfig"
    num_experts: Index = 0  # of a layer; 0: none
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count | None = None  # of each expert; null: intermediate_size

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            yield error(
                f"num_experts_per_tok: got {self.num_experts_per_tok}, expected at most"
                f" num_experts={self.num_experts}",
                *("num_experts", "num_experts_per_tok"),
            )


_FIXED: dict[str, tuple[Any, ...]] = {
    "balance_via_topk_bias": (None, False),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "routing_policy": (None, "TopkRouterV2"),
    "shared_expert_num": (None, 0),
    "use_gating_sigmoid": (None, False),
}


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The bias of attention's last matrix, which a newer release calls otherwise; experts."""
    llama.translate(raw, defaults, result)
    own = raw["model"]["model_config"]
    if own.get("type") == TelechatSettings.type and "attn_proj_has_bias" not in own:
        biases = [own[name] for name in ("out_proj_has_bias", "wo_has_bias") if name in own]
        result.assignments[f"{PREFIX}attn_proj_has_bias"] = biases[0] if biases else True
    if claims(raw):
        experts.translate(raw, result, "TeleChat2", _OF_EXPERTS, _FIXED)


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers is of a TeleChat with experts."""
    return network_of(raw) in _NETWORKS and experts.has_experts(raw)


_NETWORKS = ("TelechatForCausalLM", "ParallelTelechatForCausalLM")


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Of each head its key, then its value."""
    if parameter.part is None:
        return None
    import numpy as np

    rows = np.arange(2 * model.n_kv_heads * model.head_dim).reshape(model.n_kv_heads, 2, -1)
    found: Rows = rows[:, parameter.part - 1].reshape(-1)
    return found


TELECHAT = Architecture(
    "telechat",
    read,
    NAMES,
    write,
    MindFormers(
        TelechatSettings,
        _NETWORKS[0],
        "llama",
        settings,
        from_settings,
        model="telechat2_7b",
        also=_NETWORKS[1:],
        hidden_act=("silu",),
        translated=llama.TRANSLATED | {"out_proj_has_bias", "wo_has_bias"},
        claims=claims,
        translate=translate,
    ),
    no_effect={
        **dict.fromkeys(
            (
                *(
                    "attention_softmax_in_fp32",
                    "bias_dropout_fusion",
                    "flash_attn",
                    "pretraining_tp",
                ),
                *("masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
            ),
            KERNEL,
        ),
        "logn": "of texts longer than those of the training",
        "n_inner": "ffn_hidden_size is beside it",
    },
    stored_rows=stored_rows,
)
TELECHAT3 = dataclasses.replace(
    llama.LLAMA,
    name="telechat3",
    mindformers=None,
    gguf=None,
    no_effect={
        **llama.LLAMA.no_effect,
        **dict.fromkeys(("base_seqlen", "logn", "training_seqlen"), "rope_scaling is beside it"),
    },
)
