"""Models of other sizes, for tests."""

from __future__ import annotations

import inspect
from typing import Any

from lite_runner.architectures import bloom, gpt2, llama_like
from lite_runner.architectures.spec import Decoder, RopeScaling, Rotary

_CLASSIC = {"bloom": bloom.decoder, "gpt2": gpt2.decoder}


def ModelConfig(
    family: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    n_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    seq_length: int,
    norm_eps: float,
    tie_word_embeddings: bool,
    theta: float = 10000.0,
    rope_scaling: RopeScaling | None = None,
    qkv_has_bias: bool = False,
    bos_token_id: int | None = None,
    eos_token_id: tuple[int, ...] = (),
    pad_token_id: int | None = None,
) -> Decoder:
    """The decoder of a family; for a family that is not built in only the sizes matter."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "seq_length": seq_length,
        "norm_eps": norm_eps,
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    if family in _CLASSIC:
        return _CLASSIC[family](**sizes)
    return llama_like.decoder(
        architecture="" if family == "llama" else family,
        n_kv_heads=n_kv_heads,
        rotary=Rotary(theta, rope_scaling),
        qkv_bias=qkv_has_bias,
        **sizes,
    )


def resized(model: Decoder, **changes: Any) -> Decoder:
    """`model` with other sizes, by the names that ModelConfig has for them."""
    sizes = model.sizes()
    flat = {name: sizes[name] for name in inspect.signature(ModelConfig).parameters}
    if sizes["qkv_has_bias"] and sizes["theta"]:
        flat["family"] = "llama" if model.rotary is not None else flat["family"]
    return ModelConfig(**flat | changes)
