"""MindFormers 1.0.2, on mindspore 2.0.0: read from its sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.python import PYTHON_1_0
from lite_runner.backends.mindformers.release import (
    Family,
    MindFormersRelease,
    head_faults,
    hides_pads,
    llama_faults,
    llama_settings,
    pad_token,
)

EPSILON = 1e-5  # of LayerNorm, whatever the yaml says


def _llama_faults(model: Decoder) -> Iterator[str]:
    scaling = model.rotary.scaling if model.rotary else None
    if scaling is not None and scaling.type != "linear":
        yield f"it has no {scaling.type} scaling of rotary positions, only a linear one"
    yield from llama_faults(model)
    if model.attention.out_bias or model.feed_forward.bias:
        yield "its Llama has biases on q, k and v only"


def _llama(model: Decoder) -> dict[str, Any]:
    settings = llama_settings(model)
    assert model.rotary is not None
    if (scaling := model.rotary.scaling) is not None:
        settings |= {"extend_method": "PI", "scaling_factor": scaling.factor}
    return settings


def _own_settings(model: Decoder) -> dict[str, Any]:
    theirs = architecture_of(model).mindformers
    assert theirs is not None
    return theirs.settings(model)


def _glm2(model: Decoder) -> dict[str, Any]:
    settings = _own_settings(model)
    return {
        **settings,
        "add_qkv_bias": settings["qkv_has_bias"],
        "padded_vocab_size": model.vocab_size,
        "num_attention_heads": model.num_heads,
    }


def _layer_norm_faults(model: Decoder) -> Iterator[str]:
    if model.norm_eps != EPSILON:
        yield f"its LayerNorm has an epsilon of {EPSILON:g}, not {model.norm_eps:g}"
    if model.intermediate_size % model.hidden_size:
        yield (
            f"its feed-forward is a multiple of hidden_size={model.hidden_size}, not "
            f"{model.intermediate_size}"
        )


def _layer_norm(model: Decoder) -> dict[str, Any]:
    return {
        "expand_ratio": model.intermediate_size // model.hidden_size,
        "embedding_dropout_prob": 0.0,
        "hidden_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
    }


def _none(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return ()


def _pads_without_cache(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return () if use_past else (pad_token(model),)


def _ends(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return model.eos_token_id[:1]


def _ends_without_cache(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return () if use_past else model.eos_token_id[:1]


V1_0_2 = MindFormersRelease(
    "1.0.2",
    "2.0.0",
    PYTHON_1_0,
    {
        "LlamaConfig": Family(_llama_faults, _llama, hides_pads),
        "BloomConfig": Family(
            _layer_norm_faults, _layer_norm, _ends_without_cache, half_cache=True
        ),
        "ChatGLM2Config": Family(
            head_faults,
            _glm2,
            _pads_without_cache,
            one_row=True,
            renamed={
                "transformer.embedding.embedding_weight": "transformer.embedding.embedding_table"
            },
        ),
        "GLMConfig": Family(
            head_faults,
            _own_settings,
            _none,
            no_export="its exported GLM takes positions and a mask, which no engine here gives it",
        ),
        "GPT2Config": Family(
            _layer_norm_faults,
            _layer_norm,
            _ends,
            no_export="MindSpore Lite does not run the mask of its exported GPT-2",
        ),
    },
    sections={},
    context={},
)
