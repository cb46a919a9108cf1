"""What MindFormers 1.0.2 can compute, and a model as the section `model` of its yaml.

Read from its sources. Its yaml says more than `config/model_yaml.py` writes, which is for this
project to read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder

EPSILON = 1e-5  # of LayerNorm, whatever the yaml says
DType = Literal["float32", "float16"]


@dataclass(frozen=True)
class Sizes:
    """The static sizes of a network."""

    batch: int  # rows, beams included
    length: int  # positions, prompt and new tokens
    dtype: DType
    use_past: bool


@dataclass(frozen=True)
class _Family:
    """A config class of MindFormers."""

    unsupported: Callable[[Decoder], Iterator[str]]
    settings: Callable[[Decoder], dict[str, Any]]
    hidden: Callable[[Decoder, bool], tuple[int, ...]]  # with use_past: ids that attention hides
    half_cache: bool = False  # the cache takes float16 only, and with it the weights
    one_row: bool = False  # with a cache it reads the logits of every prompt from the first row
    renamed: Mapping[str, str] = field(default_factory=dict)  # later names of tensors -> its own


def unsupported(model: Decoder) -> list[str]:
    """Why MindFormers 1.0.2 cannot compute the model; empty where it can."""
    family = _family(model)
    if family is None:
        theirs = architecture_of(model).mindformers
        return [f"it has no {theirs.config}" if theirs else "it has no such architecture"]
    return list(family.unsupported(model))


def hidden_tokens(model: Decoder, *, use_past: bool) -> tuple[int, ...]:
    """Token ids that MindFormers' attention does not see, wherever they stand in a prompt."""
    family = _family(model)
    assert family is not None, "see unsupported"
    return family.hidden(model, use_past)


def computed_in(model: Decoder, wanted: DType, *, use_past: bool) -> DType:
    """The type of the weights where `wanted` was asked for."""
    family = _family(model)
    assert family is not None, "see unsupported"
    return "float16" if family.half_cache and use_past else wanted


def rows_together(model: Decoder, wanted: int, *, use_past: bool) -> int:
    """How many of `wanted` rows are completed together."""
    family = _family(model)
    assert family is not None, "see unsupported"
    return 1 if family.one_row and use_past else wanted


def tensor_name(model: Decoder, name: str) -> str:
    """What the release calls a tensor that later ones call `name`."""
    family = _family(model)
    assert family is not None, "see unsupported"
    return family.renamed.get(name, name)


def static_length(model: Decoder, wanted: int) -> int:
    """Positions of a network for sequences of `wanted` tokens: learned positions are a weight."""
    return model.seq_length if model.learned_positions else wanted


def model_section(model: Decoder, sizes: Sizes) -> dict[str, Any]:
    """`model` of the yaml, with random weights until a checkpoint is loaded."""
    theirs, family = architecture_of(model).mindformers, _family(model)
    assert theirs is not None and family is not None, "see unsupported"
    return {
        "arch": {"type": theirs.network},
        "model_config": {
            "type": theirs.config,
            "batch_size": sizes.batch,
            "seq_length": sizes.length,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "vocab_size": model.vocab_size,
            "bos_token_id": model.bos_token_id or 0,
            "eos_token_id": model.eos_token_id[0] if model.eos_token_id else 0,
            "pad_token_id": pad_token(model),
            "use_past": sizes.use_past,
            "compute_dtype": sizes.dtype,
            "param_init_type": sizes.dtype,
            "layernorm_compute_type": "float32",
            "softmax_compute_type": "float32",
            "checkpoint_name_or_path": "",
            "do_sample": False,
            **family.settings(model),
        },
    }


def pad_token(model: Decoder) -> int:
    """The model's pad token; where it has none that which ends a text, as MindFormers' GPT-2."""
    if model.pad_token_id is not None:
        return model.pad_token_id
    return model.eos_token_id[0] if model.eos_token_id else 0


def _llama_faults(model: Decoder) -> Iterator[str]:
    scaling = model.rotary.scaling if model.rotary else None
    if scaling is not None and scaling.type != "linear":
        yield f"it has no {scaling.type} scaling of rotary positions, only a linear one"
    yield from _head_faults(model)
    if model.attention.out_bias or model.feed_forward.bias:
        yield "its Llama has biases on q, k and v only"
    if any(model.windows):
        yield "it has no sliding windows"
    if model.rotary is None or model.rotary.dims is not None:
        yield "it rotates all dimensions of its heads"


def _llama(model: Decoder) -> dict[str, Any]:
    assert model.rotary is not None
    scaling = model.rotary.scaling
    return {
        "n_kv_heads": model.n_kv_heads,
        "max_position_embedding": model.seq_length,
        "intermediate_size": model.intermediate_size,
        "rms_norm_eps": model.norm_eps,
        "theta": model.rotary.theta,
        "extend_method": "PI" if scaling else "None",
        "scaling_factor": scaling.factor if scaling else 1.0,
        "qkv_has_bias": model.attention.qkv_bias,
        "rotary_dtype": "float32",
        # On CPU the other form multiplies by a matrix that BatchMatMul does not broadcast.
        "use_rope_slice": True,
    }


def _head_faults(model: Decoder) -> Iterator[str]:
    if model.head_dim * model.num_heads != model.hidden_size:
        yield f"its heads have hidden_size / num_heads dimensions, not {model.head_dim}"


def _glm2(model: Decoder) -> dict[str, Any]:
    theirs = architecture_of(model).mindformers
    assert theirs is not None
    settings = theirs.settings(model)
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


def _pads(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return (pad_token(model),)


def _pads_without_cache(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return () if use_past else (pad_token(model),)


def _ends(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return model.eos_token_id[:1]


def _ends_without_cache(model: Decoder, use_past: bool) -> tuple[int, ...]:
    return () if use_past else model.eos_token_id[:1]


_FAMILIES = {
    "LlamaConfig": _Family(_llama_faults, _llama, _pads),
    "BloomConfig": _Family(_layer_norm_faults, _layer_norm, _ends_without_cache, half_cache=True),
    "ChatGLM2Config": _Family(
        _head_faults,
        _glm2,
        _pads_without_cache,
        one_row=True,
        renamed={"transformer.embedding.embedding_weight": "transformer.embedding.embedding_table"},
    ),
    "GPT2Config": _Family(_layer_norm_faults, _layer_norm, _ends),
}


def _family(model: Decoder) -> _Family | None:
    theirs = architecture_of(model).mindformers
    return None if theirs is None else _FAMILIES.get(theirs.config)
