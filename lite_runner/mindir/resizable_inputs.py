"""Inputs and outputs of the `resizable` graph, for any shape.

Shapes: B rows, S new tokens a row, n = B * S, P cached positions, H heads, K key/value heads,
G = H / K, D head_dim. Lite resizes the graph to any B, S and P, but a reshape can leave only one
axis open: so tokens are [n], and `q_rows`, `k_rows`, `v_rows` gather them to [B, K, ..] and
`merge_rows` back.

    tokens [n]  q_rows [B, K, S * G]  k_rows, v_rows [B, K, S]  merge_rows [n * H]  last_rows [B]
    bias [B, 1, or of ALiBi K, S * G, S + P]: added to the scores; the new tokens come before the
    cached; where layers have windows of their own, bias.1 and so on: see `windows_of`
    rotary: cos, sin [n, H + 2 * K, D]; learned positions: positions [n]
    past_k.<layer>, past_v.<layer> [B, K, P, D]
    -> logits [B, vocab], new [B, L * 2 * K, S, D]: keys and values of each of L layers in turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lite_runner.architectures import custom_network
from lite_runner.architectures.spec import Decoder
from lite_runner.mindir.manifest import TensorSpec


@dataclass(frozen=True)
class Shape:
    """What the graph is resized to."""

    rows: int  # B
    tokens: int  # S
    past: int  # P, at least 1


def unsupported(model: Decoder) -> list[str]:
    """Why the layout resizable does not support a model; empty if it does."""
    if custom_network(model) is not None:
        return [f"{model.architecture} has a custom network"]
    reasons, attentions = [], {replace(one.attention, window=None) for one in model.blocks}
    if len(attentions) > 1:
        reasons.append("attention differs between its layers by more than the window")
    if any(one.qk_norm is not None and one.qk_norm.kind != "rms" for one in attentions):
        reasons.append("queries and keys have another norm than RMSNorm")
    return reasons


def windows_of(model: Decoder) -> tuple[int | None, ...]:
    """The distinct sliding windows: there is a bias for each, in this order."""
    return tuple(dict.fromkeys(model.windows))


def bias_names(model: Decoder) -> list[str]:
    """The biases' names, in the order of `windows_of`."""
    return [f"bias.{at}" if at else "bias" for at in range(len(windows_of(model)))]


def inputs_of(model: Decoder, shape: Shape) -> tuple[TensorSpec, ...]:
    """The inputs in the graph's order, at one shape."""
    heads, kv, dim = model.num_heads, model.n_kv_heads, model.head_dim
    count, queries = shape.rows * shape.tokens, shape.tokens * (heads // kv)
    apart = kv if model.attention.alibi else 1
    bias = (shape.rows, apart, queries, shape.tokens + shape.past)
    inputs = [
        TensorSpec("tokens", (count,), "int32"),
        TensorSpec("q_rows", (shape.rows, kv, queries), "int32"),
        TensorSpec("k_rows", (shape.rows, kv, shape.tokens), "int32"),
        TensorSpec("v_rows", (shape.rows, kv, shape.tokens), "int32"),
        TensorSpec("merge_rows", (count * heads,), "int32"),
        TensorSpec("last_rows", (shape.rows,), "int32"),
        *(TensorSpec(name, bias, "float32") for name in bias_names(model)),
    ]
    if model.rotary is not None:
        angles = (count, heads + 2 * kv, dim)
        inputs += [TensorSpec(name, angles, "float32") for name in ("cos", "sin")]
    if model.learned_positions:
        inputs.append(TensorSpec("positions", (count,), "int32"))
    past = (shape.rows, kv, shape.past, dim)
    inputs += [
        TensorSpec(f"past_{kind}.{layer}", past, "float32")
        for layer in range(model.num_layers)
        for kind in "kv"
    ]
    return tuple(inputs)


def outputs_of(model: Decoder, shape: Shape) -> tuple[TensorSpec, ...]:
    """The outputs in the graph's order, at one shape."""
    heads = model.num_layers * 2 * model.n_kv_heads
    return (
        TensorSpec("logits", (shape.rows, model.vocab_size), "float32"),
        TensorSpec("new", (shape.rows, heads, shape.tokens, model.head_dim), "float32"),
    )


def inputs_of_any(model: Decoder) -> tuple[TensorSpec, ...]:
    """The inputs with -1 for what depends on the shape."""
    return _open_axes(inputs_of(model, Shape(1, 1, 1)), inputs_of(model, Shape(2, 3, 5)))


def outputs_of_any(model: Decoder) -> tuple[TensorSpec, ...]:
    """The outputs with -1 for what depends on the shape."""
    return _open_axes(outputs_of(model, Shape(1, 1, 1)), outputs_of(model, Shape(2, 3, 5)))


def _open_axes(at_one: Sequence[TensorSpec], other: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """-1 for each axis that is not the same at the two shapes."""

    def opened(one: TensorSpec, two: TensorSpec) -> TensorSpec:
        pairs = zip(one.shape, two.shape, strict=True)
        return replace(one, shape=tuple(a if a == b else -1 for a, b in pairs))

    return tuple(opened(one, two) for one, two in zip(at_one, other, strict=True))
