"""Baichuan and Baichuan2: a Llama with fused q, k and v; the larger ones have ALiBi. Baichuan2's
head is normed: its rows are of length 1."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, llama, llama_like
from lite_runner.architectures.fields import TRAINING, Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import PREFIX, Translation, network_of
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

_OURS, _FUSED = "model.layers.{}.attention", "model.layers.{}.self_attn.W_pack"
NAMES: Names = {
    **llama_like.NAMES,
    "query": Name(f"{_OURS}.wq", _FUSED, 0, gguf="blk.{}.attn_q"),
    "key": Name(f"{_OURS}.wk", _FUSED, 1, gguf="blk.{}.attn_k"),
    "value": Name(f"{_OURS}.wv", _FUSED, 2, gguf="blk.{}.attn_v"),
}
NORMED_VOCABULARY = 125696  # of Baichuan2, whose config.json has no other sign
_NORMED = "normed_head"  # of a config.json of ours, with another vocabulary


def read(fields: Fields) -> Decoder:
    """From config.json; the models with ALiBi have a model_max_length alone."""
    fields.neutral(num_key_value_heads=fields.integer("num_attention_heads"))
    fields.neutral(tie_word_embeddings=False)
    alibi = fields.raw.get("max_position_embeddings") is None
    length = fields.integer("model_max_length", default=4096)
    same = fields.with_values(max_position_embeddings=length) if alibi else fields
    sizes = llama_like.sizes(same, positions=4096)
    normed = fields.flag(_NORMED, sizes["vocab_size"] == NORMED_VOCABULARY)
    return decoder(alibi=alibi, normed_head=normed, **sizes)


def decoder(*, alibi: bool, **sizes: Any) -> Decoder:
    model = llama_like.decoder(architecture="baichuan", **sizes)
    return llama_like.changed(model, {"rotary": None, "alibi": True}) if alibi else model


def write(model: Decoder) -> dict[str, Any]:
    found = llama_like.shared(model)
    for key in ("num_key_value_heads", "head_dim", "rope_scaling"):
        del found[key]
    if model.attention.alibi:
        found["model_max_length"] = found.pop("max_position_embeddings")
        del found["rope_theta"]
    if model.normed_head != (model.vocab_size == NORMED_VOCABULARY):
        found[_NORMED] = model.normed_head
    return found | {"architectures": ["BaichuanForCausalLM"]}


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp recognizes the models with ALiBi by their 40 layers."""
    if given["num_hidden_layers"] != 40:
        return {}
    return {
        "max_position_embeddings": None,
        "model_max_length": given["max_position_embeddings"],
        "rope_theta": None,
    }


_NETWORKS = ("Baichuan7BV2ForCausalLM", "Baichuan13BV2ForCausalLM")


def settings(model: Decoder) -> dict[str, Any]:
    own = {"alibi": model.attention.alibi, "normed_head": model.normed_head}
    return llama.settings(model) | own


def from_settings(given: Mapping[str, Any]) -> Decoder:
    own = {name: given[name] for name in ("alibi", "normed_head")}
    return decoder(**llama.sizes_of_settings(given), **own)


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers, whose config class is a Llama's, names one of the networks."""
    return network_of(raw) in _NETWORKS


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The larger network has ALiBi. A file of ours, which has the first one's name, says so."""
    if claims(raw) and raw["model"]["model_config"].get("type") != BaichuanSettings.type:
        result.assignments |= {
            f"{PREFIX}type": BaichuanSettings.type,
            f"{PREFIX}normed_head": True,
            f"{PREFIX}alibi": network_of(raw) == _NETWORKS[1],
        }


@dataclass(frozen=True, kw_only=True)
class BaichuanSettings(llama.LlamaLikeSettings):
    """Settings of Baichuan and Baichuan2."""

    type: Literal["BaichuanConfig"] = "BaichuanConfig"
    alibi: bool = False  # positions are ALiBi's, in place of rotary ones
    normed_head: bool = False  # the head's rows are divided by their lengths


BAICHUAN = Architecture(
    "baichuan",
    read,
    NAMES,
    write,
    MindFormers(
        BaichuanSettings,
        _NETWORKS[0],
        "llama",
        settings,
        from_settings,
        model="baichuan2_7b",
        also=_NETWORKS[1:],
        hidden_act=("silu",),
        claims=claims,
        translate=translate,
    ),
    GGUF(llama_like.KEYS, permuted=True, infer=infer_from_gguf, written=False),
    no_effect={"_from_model_config": "says where the files are from", "z_loss_weight": TRAINING},
)
