"""Families whose code is published beside their weights, against that code's formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import baichuan
from lite_runner.architectures.reference import forward
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from lite_runner.weights.formats.fused import by_name
from lite_runner.weights.formats.hugging_face import (
    from_hugging_face,
    shapes_in_files,
    to_hugging_face,
)
from lite_runner.weights.formats.mindformers import (
    stored_name,
    to_mindformers,
    with_canonical_names,
)
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.paths import FIXTURES

Array = NDArray[Any]
Tensors = dict[str, Array]
TOKENS = np.array([3, 41, 7, 22, 60, 3, 9, 18, 33, 2, 5, 47], np.int32)
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "intermediate_size": 48, "tie_word_embeddings": False}
EPS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 64}


def normed(x: Array, gain: Array) -> Array:
    return gain * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def rotated(x: Array, theta: float) -> Array:
    """x [T, heads, d]: rotate_half of the published code."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))
    cos, sin = (np.concatenate([one, one], -1)[:, None] for one in (np.cos(angles), np.sin(angles)))
    turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin


def attended(q: Array, k: Array, v: Array, bias: Array | float = 0.0) -> Array:
    """q [T, H, d], k and v [T, K, d], bias [H, T, T] -> [T, H * d]"""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(one, group, axis=1) for one in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1]) + bias
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def internlm(t: Tensors, raw: dict[str, Any]) -> Array:
    x = t["model.embed_tokens.weight"][TOKENS]
    for layer in ("model.layers.0.", "model.layers.1."):
        h = normed(x, t[f"{layer}input_layernorm.weight"])
        names = (f"{layer}self_attn.{one}_proj" for one in "qkv")
        q, k, v = (
            (h @ t[f"{one}.weight"].T + t[f"{one}.bias"]).reshape(len(x), 4, -1) for one in names
        )
        h = attended(rotated(q, 500.0), rotated(k, 500.0), v)
        x = x + h @ t[f"{layer}self_attn.o_proj.weight"].T + t[f"{layer}self_attn.o_proj.bias"]
        x = x + llama_mlp(normed(x, t[f"{layer}post_attention_layernorm.weight"]), t, layer)
    return normed(x, t["model.norm.weight"]) @ t["lm_head.weight"].T


def llama_mlp(h: Array, t: Tensors, layer: str) -> Array:
    gate, up, down = (t[f"{layer}mlp.{one}_proj.weight"] for one in ("gate", "up", "down"))
    inner: Array = silu(h @ gate.T) * (h @ up.T)
    return inner @ down.T


def internlm2(t: Tensors, raw: dict[str, Any]) -> Array:
    x = t["model.tok_embeddings.weight"][TOKENS]
    for layer in ("model.layers.0.", "model.layers.1."):
        h = normed(x, t[f"{layer}attention_norm.weight"])
        # b q (h gs d), of which the last two of a group are key and value
        qkv = (h @ t[f"{layer}attention.wqkv.weight"].T).reshape(len(x), 2, 4, 8)
        q, k, v = qkv[:, :, :2].reshape(len(x), 4, 8), qkv[:, :, -2], qkv[:, :, -1]
        h = attended(rotated(q, 10000.0), rotated(k, 10000.0), v)
        x = x + h @ t[f"{layer}attention.wo.weight"].T
        h = normed(x, t[f"{layer}ffn_norm.weight"])
        gate, down, up = (t[f"{layer}feed_forward.w{one}.weight"] for one in (1, 2, 3))
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
    return normed(x, t["model.norm.weight"]) @ t["output.weight"].T


def baichuan_of(t: Tensors, raw: dict[str, Any]) -> Array:
    x, alibi = t["model.embed_tokens.weight"][TOKENS], "max_position_embeddings" not in raw
    bias: Array | float = 0.0
    if alibi:
        slopes = 2.0 ** (-8 * np.arange(1, 5) / 4)
        bias = slopes[:, None, None] * np.arange(len(x))
    for layer in ("model.layers.0.", "model.layers.1."):
        h = normed(x, t[f"{layer}input_layernorm.weight"])
        packed = h @ t[f"{layer}self_attn.W_pack.weight"].T
        q, k, v = (one.reshape(len(x), 4, 8) for one in np.split(packed, 3, axis=-1))
        if not alibi:
            q, k = rotated(q, 10000.0), rotated(k, 10000.0)
        x = x + attended(q, k, v, bias) @ t[f"{layer}self_attn.o_proj.weight"].T
        x = x + llama_mlp(normed(x, t[f"{layer}post_attention_layernorm.weight"]), t, layer)
    head = t["lm_head.weight"]
    if raw["vocab_size"] == baichuan.NORMED_VOCABULARY:
        head = head / np.linalg.norm(head, axis=-1, keepdims=True)
    return normed(x, t["model.norm.weight"]) @ head.T


def qwen(t: Tensors, raw: dict[str, Any]) -> Array:
    x = t["transformer.wte.weight"][TOKENS]
    for layer in ("transformer.h.0.", "transformer.h.1."):
        h = normed(x, t[f"{layer}ln_1.weight"])
        mixed = h @ t[f"{layer}attn.c_attn.weight"].T + t[f"{layer}attn.c_attn.bias"]
        q, k, v = (one.reshape(len(x), 4, 8) for one in np.split(mixed, 3, axis=-1))
        h = attended(rotated(q, 10000.0), rotated(k, 10000.0), v)
        x = x + h @ t[f"{layer}attn.c_proj.weight"].T
        h = normed(x, t[f"{layer}ln_2.weight"])
        first, second = (h @ t[f"{layer}mlp.w{one}.weight"].T for one in (1, 2))
        x = x + (first * silu(second)) @ t[f"{layer}mlp.c_proj.weight"].T
    return normed(x, t["transformer.ln_f.weight"]) @ t["lm_head.weight"].T


def minicpm(t: Tensors, raw: dict[str, Any]) -> Array:
    x = t["model.embed_tokens.weight"][TOKENS] * raw["scale_emb"]
    depth = raw["scale_depth"] / np.sqrt(raw["num_hidden_layers"])
    for layer in ("model.layers.0.", "model.layers.1."):
        h = normed(x, t[f"{layer}input_layernorm.weight"])
        names = (f"{layer}self_attn.{one}_proj" for one in "qkv")
        q, k, v = ((h @ t[f"{one}.weight"].T).reshape(len(x), -1, 8) for one in names)
        h = attended(rotated(q, 10000.0), rotated(k, 10000.0), v)
        x = x + depth * (h @ t[f"{layer}self_attn.o_proj.weight"].T)
        h = llama_mlp(normed(x, t[f"{layer}post_attention_layernorm.weight"]), t, layer)
        x = x + depth * h
    x = normed(x, t["model.norm.weight"]) / (raw["hidden_size"] / raw["dim_model_base"])
    return x @ t["model.embed_tokens.weight"].T


def telechat(t: Tensors, raw: dict[str, Any]) -> Array:
    x = t["transformer.word_embeddings.weight"][TOKENS]
    # Texts of the training's length: four times the base's make the base 7 times as large.
    alpha = 2 ** np.ceil(np.log2(raw["training_seqlen"] / raw["base_seqlen"]) + 1) - 1
    theta = 10000.0 * alpha ** (8 / 6)
    for layer in ("transformer.h.0.", "transformer.h.1."):
        h = normed(x, t[f"{layer}input_layernorm.weight"])
        q = (h @ t[f"{layer}self_attention.query.weight"].T).reshape(len(x), 4, 8)
        mixed = (h @ t[f"{layer}self_attention.key_value.weight"].T).reshape(len(x), 2, 16)
        k, v = np.split(mixed, 2, axis=-1)
        h = attended(rotated(q, theta), rotated(k, theta), v)
        x = x + h @ t[f"{layer}self_attention.dense.weight"].T
        x = x + t[f"{layer}self_attention.dense.bias"]
        h = normed(x, t[f"{layer}post_attention_layernorm.weight"])
        x = x + llama_mlp(h, t, layer) + t[f"{layer}mlp.down_proj.bias"]
    return normed(x, t["transformer.ln_f.weight"]) @ t["lm_head.weight"].T


def layer_normed(x: Array, t: Tensors, name: str) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return normed(x, t[f"{name}.gamma"]) + t[f"{name}.beta"]


def iflytekspark(t: Tensors, raw: dict[str, Any]) -> Array:
    """As research/iflytekspark of MindFormers 1.0.2 computes it, by the names of its checkpoint."""

    def dense(x: Array, name: str) -> Array:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    table = t["transformer.embedding.word_embeddings.embedding_table"]
    x, at = table[TOKENS], np.arange(len(TOKENS))
    outside = (at[:, None] - at >= raw["sparse_local_size"]) * -1e9  # pre_tokens
    for layer in ("transformer.transformer.layers.0.", "transformer.transformer.layers.1."):
        h = layer_normed(x, t, f"{layer}layer_norm")
        fused = np.split(dense(h, f"{layer}attention.q_k_v_proj"), 3, axis=-1)
        q, k, v = (one.reshape(len(x), 4, 8) for one in fused)
        h = attended(rotated(q, 1e6), rotated(k, 1e6), v, outside)
        x = x + dense(h, f"{layer}attention.out_proj")
        h = layer_normed(x, t, f"{layer}final_layer_norm")
        inner = gelu(dense(h, f"{layer}mlp.fc0")) * dense(h, f"{layer}mlp.fc1")
        x = x + dense(inner, f"{layer}mlp.fc2")
    return layer_normed(x, t, "transformer.transformer.layernorm") @ table.T


def gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def pangualpha(t: Tensors, raw: dict[str, Any]) -> Array:
    """As models/pangualpha of MindFormers 1.0.2 computes it, by the names of its checkpoint."""

    def block(x: Array, query: Array | None, layer: str) -> Array:
        h = layer_normed(x, t, f"{layer}layernorm1")
        asked = h if query is None else query  # QueryLayer's is the row of a table
        q, k, v = (
            (one @ t[f"{layer}attention.dense{n}.weight"].T + t[f"{layer}attention.dense{n}.bias"])
            for n, one in ((1, asked), (2, h), (3, h))
        )
        h = attended(*(one.reshape(len(x), 4, 8) for one in (q, k, v)))
        x = x + h @ t[f"{layer}attention.projection.weight"]  # [in, out]
        x = x + t[f"{layer}attention.projection.bias"]
        h = layer_normed(x, t, f"{layer}layernorm2")
        h = h @ t[f"{layer}output.mapping.weight"] + t[f"{layer}output.mapping.bias"]
        h = h / (1 + np.exp(-1.702 * h))  # fast_gelu
        return x + h @ t[f"{layer}output.projection.weight"] + t[f"{layer}output.projection.bias"]

    table, length = t["backbone.embedding.word_embedding.embedding_table"], len(TOKENS)
    x = table[TOKENS] + t["backbone.embedding.position_embedding.embedding_table"][:length]
    for layer in range(raw["num_layers"] - 1):
        x = block(x, None, f"backbone.blocks.{layer}.")
    x = layer_normed(x, t, "backbone.layernorm")
    asked = t["backbone.top_query_embedding.embedding_table"][:length]
    return block(x, asked, "backbone.top_query_layer.") @ table.T


NORMED = {"vocab_size": baichuan.NORMED_VOCABULARY}
WITHOUT_POSITIONS = SIZES | {"rms_norm_eps": 1e-5}
QWEN = {"kv_channels": 8, "seq_length": 64, "layer_norm_epsilon": 1e-5, "intermediate_size": 96}
TELECHAT = {"n_layer": 2, "n_head": 4, "ffn_hidden_size": 48, "num_key_value_heads": 2}
TELECHAT |= {"training_seqlen": 64, "base_seqlen": 16, "layer_norm_epsilon": 1e-5}
TELECHAT |= {name: SIZES[name] for name in ("vocab_size", "hidden_size", "tie_word_embeddings")}
SCALES = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 8, "num_key_value_heads": 2}
TYPED: dict[str, tuple[Callable[[Tensors, dict[str, Any]], Array], dict[str, Any]]] = {
    "internlm": (internlm, SIZES | EPS | {"rotary": {"base": 500, "type": "dynamic"}}),
    "internlm2": (internlm2, SIZES | EPS | {"num_key_value_heads": 2, "bias": False}),
    "baichuan": (baichuan_of, SIZES | EPS),
    "baichuan alibi": (baichuan_of, WITHOUT_POSITIONS | {"model_max_length": 64}),
    "baichuan normed": (baichuan_of, SIZES | EPS | NORMED),
    "qwen": (qwen, SIZES | QWEN),
    "telechat": (telechat, TELECHAT),
    "minicpm": (minicpm, SIZES | EPS | SCALES | {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", TYPED)
def test_logits_equal_those_of_the_published_code(
    case: str, relative_error: Callable[..., float]
) -> None:
    compute, raw = TYPED[case]
    raw = raw | {"model_type": case.split()[0]}
    model = model_config_from_hf(raw, "config.json", notes=False)
    rng = np.random.default_rng(len(case))
    tensors = {
        name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype(np.float32)
        for name, shape in shapes_in_files(model).items()
    }
    held = {
        name: LazyTensor(one.shape, "F32", lambda one=one: one) for name, one in tensors.items()
    }
    ours = from_hugging_face(held, model, "folder")
    found = forward(model, {name: one.float32() for name, one in ours.items()}, TOKENS)
    wide = {name: one.astype(np.float64) for name, one in tensors.items()}
    assert relative_error(found, compute(wide, raw)) <= 1e-6
    # What is written is read as the same model.
    assert model_config_from_hf(hf_from_model_config(model), "config.json") == model
    back = from_hugging_face(to_hugging_face(ours, model), model, "folder")
    assert all(np.allclose(back[name].read(), ours[name].read(), 1e-6) for name in ours)
    # A file of MindFormers has the head as it is published.
    published = {name: held[name] for name in ("lm_head.weight",) if name in held}
    stored = {**to_mindformers(ours, model), **(published if model.normed_head else {})}
    back = with_canonical_names(stored, model, "file")
    assert all(np.allclose(back[name].read(), ours[name].read(), 1e-6) for name in ours)
    assert case != "qwen" or "transformer.layers.1.attention.wk.bias" in stored


def test_logits_equal_those_of_mindformers_code(relative_error: Callable[..., float]) -> None:
    """Families that have no other code, by the names of their checkpoints."""
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size")}
    sizes |= {"num_heads": 4, "ffn_hidden_size": 96, "seq_length": 64}
    for compute, own in (
        (iflytekspark, {"num_layers": 2, "sparse_local_size": 5}),
        (pangualpha, {"num_layers": 3}),
    ):
        raw = sizes | own | {"model_type": compute.__name__}
        model = model_config_from_hf(raw, "config.json", notes=False)
        rng = np.random.default_rng(7)
        stored = {
            name: rng.normal(1.0 if name.endswith("gamma") else 0.0, 0.3, shape).astype(np.float32)
            for name, parts in by_name(model, stored_name).items()
            for shape in [(sum(one.shape[0] for one in parts), *parts[0].shape[1:])]
        }
        held = {
            name: LazyTensor(one.shape, "F32", lambda one=one: one) for name, one in stored.items()
        }
        ours = with_canonical_names(held, model, "file")
        read = {name: one.float32() for name, one in ours.items()}
        found = forward(model, read, TOKENS)
        wide = {name: one.astype(np.float64) for name, one in stored.items()}
        assert relative_error(found, compute(wide, raw)) <= 1e-6
        layers = pack(model, QuantizedWeights(ours, model))
        backend = NativeBackend(model, layers, NativeOptions(1, 64))
        logits = [backend.forward([Row(0, TOKENS[:7], 0)])[0]]
        logits += [backend.forward([Row(0, TOKENS[at : at + 1], at)])[0] for at in range(7, 12)]
        assert relative_error(np.stack(logits), found[6:]) <= 1e-5
        backend.close()
        assert model_config_from_hf(hf_from_model_config(model), "config.json") == model
        folder = to_hugging_face(ours, model)
        assert folder.keys() == shapes_in_files(model).keys()
        for back in (
            from_hugging_face(folder, model, "folder"),
            with_canonical_names(folder, model, "file"),
            with_canonical_names(to_mindformers(ours, model), model, "file"),
        ):
            assert all((back[name].read() == ours[name].read()).all() for name in ours)
    # The real MindFormers 1.0.2, which rounds to float16 on the way: see make_glm2_reference.py.
    sizes = {"vocab_size": 64, "hidden_size": 16, "ffn_hidden_size": 64, "num_layers": 3}
    raw = {**sizes, "num_heads": 2, "seq_length": 16, "model_type": "pangualpha"}
    model = model_config_from_hf(raw, "config.json")
    ours = open_checkpoint(FIXTURES / "mindformers/pangualpha/pangualpha.ckpt", model)
    known = np.load(FIXTURES / "mindformers/pangualpha/expected.npz")
    read = {name: one.float32() for name, one in ours.items()}
    found = forward(model, read, known["tokens"])
    assert relative_error(found, known["logits"]) <= 2e-3
    assert (found.argmax(-1) == known["logits"].argmax(-1)).all()
