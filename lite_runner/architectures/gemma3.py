"""Gemma 3, its text model: a Gemma 2 without a cap of scores, with a norm of each head's queries
and keys, and with other rotary positions in the layers with windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, gemma2, llama_like
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.llama import FULL, SLIDING, LlamaLikeSettings
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.records import dataclass

NAMES: Names = {**gemma2.NAMES, **llama_like.QUERY_KEY_NORMS}
LOCAL_THETA = 10000.0


def decoder(**sizes: Any) -> Decoder:
    return gemma2.decoder(architecture="gemma3_text", qk_norm=True, **sizes)


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(
        vocab_size=262208, max_position_embeddings=131072, rope_theta=1e6, rms_norm_eps=1e-6
    )
    if fields.raw.get("attn_logit_softcapping") is not None:
        got = fields.raw["attn_logit_softcapping"]
        raise fields.invalid("attn_logit_softcapping", got, "null: transformers does not apply it")
    period = fields.integer("sliding_window_pattern", default=6)
    rope, local = ropes(fields, LOCAL_THETA)
    return decoder(local_rotary=Rotary(local), **gemma2.sizes(fields, period=period, rope=rope))


def ropes(fields: Fields, local_theta: float) -> tuple[Fields | None, float]:
    """The rotary parameters of layers without a window, if they are an object of their own, and
    theta of layers with one; `local_theta` is its default."""
    theta = fields.number("rope_local_base_freq", local_theta)
    given = fields.raw.get("rope_parameters")
    if given is None:
        return None, theta
    both = fields.section("rope_parameters")
    if not {FULL, SLIDING} >= both.raw.keys():
        raise fields.invalid("rope_parameters", given, f"an object of {FULL} and {SLIDING}")
    if fields.raw.get("rope_scaling"):
        raise fields.invalid(
            "rope_scaling", fields.raw["rope_scaling"], "null with rope_parameters"
        )
    local = both.section(SLIDING)
    local.choice("rope_type", ("default",))
    return both.section(FULL), local.number("rope_theta", theta)


def _local_theta(model: Decoder) -> float:
    return next((one.theta for one in model.rotaries if one != model.rotary), LOCAL_THETA)


def write(model: Decoder) -> dict[str, Any]:
    return gemma2.shared(model) | {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": _local_theta(model),
    }


def settings(model: Decoder) -> dict[str, Any]:
    return gemma2.settings(model) | {"rope_local_base_freq": _local_theta(model)}


def from_settings(given: Mapping[str, Any]) -> Decoder:
    local = Rotary(given["rope_local_base_freq"] or LOCAL_THETA)
    return decoder(local_rotary=local, **gemma2.sizes_of_settings(given))


@dataclass(frozen=True, kw_only=True)
class Gemma3Settings(LlamaLikeSettings):
    """Settings of Gemma 3."""

    type: Literal["Gemma3TextConfig"] = "Gemma3TextConfig"


GEMMA3_TEXT = dataclasses.replace(
    gemma2.GEMMA2,
    name="gemma3_text",
    read=read,
    names=NAMES,
    write=write,
    mindformers=MindFormers(
        Gemma3Settings,
        "Gemma3ForCausalLM",
        "llama",
        settings,
        from_settings,
        model="gemma3_1b",
        hidden_act=gemma2.HIDDEN_ACT,
    ),
    gguf=None,
)


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """llama.cpp's defaults for missing metadata."""
    return {"model_type": "gemma3_text", "query_pre_attn_scalar": gemma2.scalar_of_gguf(given, 62)}


GEMMA3 = Architecture(
    "gemma3",
    read,
    gguf=GGUF(
        gemma2.KEYS
        | {
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        flags=llama_like.BIAS_FLAG,
        infer=infer_from_gguf,
    ),
    text_of="gemma3_text",
)
