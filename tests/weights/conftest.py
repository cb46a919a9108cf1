"""Tiny models of every family, and GGUF files of them laid out as llama.cpp does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lite_runner.architectures import llama_like
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.weights import LazyTensor
from lite_runner.weights.layouts import random_checkpoint
from tests.sizes import ModelConfig

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 8,
    "intermediate_size": 128,
    "seq_length": 64,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": (2,),
    "pad_token_id": 3,
}
GROUPED = {"n_kv_heads": 2, "intermediate_size": 96}
CONFIGS = {
    "bloom": ModelConfig(family="bloom", **SIZES),
    "gpt2": ModelConfig(family="gpt2", **SIZES),
    "llama": ModelConfig(
        family="llama", **(SIZES | GROUPED | {"head_dim": 16, "tie_word_embeddings": False})
    ),
    "qwen2": ModelConfig(family="llama", **(SIZES | GROUPED), qkv_has_bias=True),
    "qwen3": llama_like.decoder(
        architecture="qwen3",
        rotary=Rotary(1e6),
        qkv_bias=True,
        out_bias=True,
        qk_norm=True,
        windows=(None, 8),
        **(SIZES | GROUPED | {"head_dim": 16}),
    ),
    "mistral": llama_like.decoder(
        architecture="mistral", rotary=Rotary(), windows=(8, 8), **(SIZES | GROUPED)
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Decoder:
    """Each tiny model in turn."""
    return CONFIGS[request.param]


@pytest.fixture
def configs() -> dict[str, Decoder]:
    """The tiny models by name: bloom, gpt2, llama (untied, own head_dim), qwen2 (bias, tied),
    qwen3 (normed q and k, biases, own head_dim, one window), mistral (windows)."""
    return CONFIGS


@pytest.fixture
def values() -> Callable[..., dict[str, LazyTensor]]:
    """Random canonical tensors of a model, in one of the three types."""

    def make(config: Decoder, dtype: str = "F32", seed: int = 0) -> dict[str, LazyTensor]:
        tensors = {}
        for name, tensor in random_checkpoint(config, seed).items():
            array = tensor.read()
            if dtype == "F16":
                array = array.astype(np.float16)
            if dtype == "BF16":
                array = (array.view(np.uint32) >> 16).astype(np.uint16)
            tensors[name] = LazyTensor(tensor.shape, dtype, lambda array=array: array)  # type: ignore[arg-type]
        return tensors

    return make


@pytest.fixture
def same() -> Callable[..., None]:
    """Asserts that two checkpoints hold the same names, types, shapes and bits."""

    def compare(found: dict[str, LazyTensor], expected: dict[str, LazyTensor]) -> None:
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
            got = found[name].read()
            assert got.shape == tensor.shape and got.flags.c_contiguous, name
            assert got.tobytes() == tensor.read().tobytes(), name

    return compare


LLAMA_NAMES = {
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


def _permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as llama.cpp orders them: the two halves of a head interleaved."""
    order = []
    head_dim = len(array) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            order += [head * head_dim + i, head * head_dim + i + head_dim // 2]
    return array[order]


def _llama_cpp_tensors(
    config: Decoder, architecture: str, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    result: dict[str, np.ndarray] = {}
    fused: dict[str, list[np.ndarray]] = {}
    for name, array in arrays.items():
        parts = name.split(".")
        kind = {"gamma": "weight", "beta": "bias"}.get(parts[-1], parts[-1])
        if "layers" in parts:
            block, inner = parts[parts.index("layers") + 1], ".".join(parts[3:-1])
            heads = {"attention.wq": config.num_heads, "attention.wk": config.n_kv_heads}.get(inner)
            if architecture == "llama" and heads:
                array = _permuted(array, heads)
            result[f"blk.{block}.{LLAMA_NAMES[inner]}.{kind}"] = array
        elif "blocks" in parts:
            start = parts.index("blocks") + 1
            prefix, inner = f"blk.{parts[start]}", ".".join(parts[start + 1 : -1])
            if inner.startswith("attention.dense"):
                fused.setdefault(f"{prefix}.attn_qkv.{kind}", []).append(array)
                continue
            their = {
                "layernorm1": "attn_norm",
                "layernorm2": "ffn_norm",
                "attention.projection": "attn_output",
                "output.mapping": "ffn_up",
                "output.projection": "ffn_down",
            }[inner]
            linear = kind == "weight" and "norm" not in inner
            result[f"{prefix}.{their}.{kind}"] = array.T if linear else array
        else:
            stem = "_".join(parts[-3:-1])
            their = {
                "model_tok_embeddings": "token_embd",
                "model_norm_out": "output_norm",
                "lm_head": "output",
                "embedding_word_embedding": "token_embd",
                "embedding_position_embedding": "position_embd",
                "embedding_norm": "token_embd_norm",
                "ln_f": "output_norm",
                "backbone_layernorm": "output_norm",
            }[stem]
            kind = "weight" if kind.startswith("embedding") else kind
            result[f"{their}.{kind}"] = array
    return result | {name: np.concatenate(parts) for name, parts in fused.items()}


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """Write a model as llama.cpp's converters do, quantized to `kind` where its rows allow."""

    def write(
        path: Path,
        config: Decoder,
        architecture: str,
        arrays: dict[str, np.ndarray],
        kind: str = "F32",
        extra: dict[str, Any] | None = None,
        tensors: dict[str, np.ndarray] | None = None,
    ) -> Path:
        import gguf

        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.seq_length)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        if config.rotary is not None:
            writer.add_head_count_kv(config.n_kv_heads)
            writer.add_key_length(config.head_dim)
            writer.add_rope_freq_base(config.rotary.theta)
            writer.add_layer_norm_rms_eps(config.norm_eps)
        else:
            writer.add_layer_norm_eps(config.norm_eps)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(3)
        writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
        for key, value in (extra or {}).items():
            name = f"{architecture}.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            else:
                writer.add_float32(name, value)
        stored = _llama_cpp_tensors(config, architecture, arrays) | (tensors or {})
        for name, array in stored.items():
            array = np.ascontiguousarray(array)
            if kind != "F32" and array.ndim == 2:
                quantization = gguf.GGMLQuantizationType[kind]
                packed = gguf.quants.quantize(array, quantization)
                writer.add_tensor(name, packed, raw_dtype=quantization)
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def resident() -> Callable[[Path], int]:
    """KiB of a mapped file that this process holds, in all its mappings."""

    def count(path: Path) -> int:
        mappings = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
        own = [one for one in mappings if one.partition("\n")[0].endswith(str(path))]
        assert own
        return sum(int(one.partition("Rss:")[2].split()[0]) for one in own)

    return count
