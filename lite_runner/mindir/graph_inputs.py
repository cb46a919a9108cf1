"""Inputs and outputs of exported graphs: names, shapes and values.

A static pair: b rows of the batch, s maximum positions per row; a class for each kind of decoder,
to which `lite_runner.register_inputs` adds in MAPPING. A full graph alone takes those of a prefill.

The `resizable` graph: B rows, S new tokens per row, n = B * S, P cached positions, H heads, K
key/value heads, G = H / K, D head_dim. Lite resizes the graph to any B, S and P, but a Reshape can
leave only one axis open: so tokens are [n], and `q_rows`, `k_rows`, `v_rows` gather them to
[B, K, ..] and `merge_rows` back.

    tokens [n]  q_rows [B, K, S * G]  k_rows, v_rows [B, K, S]  merge_rows [n * H]  last_rows [B]
    bias [B, 1, or K for ALiBi, S * G, S + P]: attention mask and ALiBi, added to the scores; new
    keys come before cached ones; one per distinct sliding window (bias, bias.1, ..)
    rotary: cos, sin [n, H + 2 * K, D]; learned positions: positions [n], the position ids
    past_k.<layer>, past_v.<layer> [B, K, P, D]: the KV cache
    -> logits [B, vocab], new [B, L * 2 * K, S, D]: new keys and values of each of L layers in turn
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, custom_network
from lite_runner.architectures.positions import MASKED, RotaryAngles, alibi_slopes, for_halves
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import GraphName, TensorSpec
from lite_runner.records import dataclass

Ints = NDArray[np.int32]


class InputsOfInfer:
    """The inputs of one kind of decoder; those of MindFormers' own decoders are given by name."""

    names: tuple[str, ...]  # in order; they identify the kind of graph

    def get_inputs(
        self,
        *,
        input_ids: Ints,
        valid_length: Ints,
        current_index: Ints,
        is_first_iteration: bool,
        seq_length: int,
    ) -> list[NDArray[Any]]:
        """An array for each of `names`, with the graph's shape and type.

        `input_ids`: [b, s] in the prefill (the first iteration), [b, 1] in an increment;
        `valid_length` [b]: tokens of each row, these included; `current_index` [b]: index of each
        row's last token in the flattened batch of prompts; `seq_length`: s.
        """
        given = {
            "input_ids": input_ids,
            "valid_length": valid_length,
            "current_index": current_index,
            "init_reset": np.array([not is_first_iteration]),
            "batch_index": np.arange(len(input_ids), dtype=np.int64),  # cache slots
            "zactivate_len": np.arange(seq_length, dtype=np.int64),
        }
        return [given[name] for name in self.names]


class CommonInputsOfInfer(InputsOfInfer):
    """BLOOM and GPT-2."""

    names = ("input_ids", "current_index", "init_reset", "valid_length")


class LlamaInputsOfInfer(InputsOfInfer):
    """Llama and Qwen2."""

    names = ("input_ids", "valid_length", "batch_index", "zactivate_len")


class _IdsOfInfer(InputsOfInfer):
    """Graphs that MindFormers exports with use_past=False."""

    names = ("input_ids",)


COMMON, LLAMA = CommonInputsOfInfer(), LlamaInputsOfInfer()
IDS = _IdsOfInfer()
# By an architecture's `inputs`, or any name for foreign graphs.
MAPPING: dict[str, InputsOfInfer] = {"common": COMMON, "llama": LLAMA}


def inputs_style(model: Decoder) -> InputsOfInfer:
    """The inputs of the graphs that a model is exported to."""
    theirs = architecture_of(model).mindformers
    if model.architecture in MAPPING:
        return MAPPING[model.architecture]
    return LLAMA if theirs is None else MAPPING[theirs.inputs]


def arrays_of(
    inputs: InputsOfInfer, graph: GraphName, ids: Ints, valid: Ints, seq_length: int
) -> list[NDArray[Any]]:
    """The arrays for one run of a graph: ids [b, s or 1] and the tokens of each row [b]."""
    rows = np.arange(len(ids), dtype=np.int32)
    return inputs.get_inputs(
        input_ids=ids,
        valid_length=valid,
        # In both graphs MindFormers indexes the flattened batch of prompts.
        current_index=rows * seq_length + np.maximum(valid, 1) - 1,
        is_first_iteration=graph == "prefill",
        seq_length=seq_length,
    )


def specs_of(
    inputs: InputsOfInfer, graph: GraphName, batch_size: int, seq_length: int
) -> tuple[TensorSpec, ...]:
    ids = np.zeros((batch_size, seq_length if graph == "prefill" else 1), np.int32)
    arrays = arrays_of(inputs, graph, ids, np.ones(batch_size, np.int32), seq_length)
    return tuple(
        TensorSpec(name, array.shape, array.dtype.name)
        for name, array in zip(inputs.names, arrays, strict=True)
    )


def same_but_for_ones(given: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> bool:
    """True if inputs match apart from axes of size 1: [b] matches [b, 1]."""

    def plain(spec: TensorSpec) -> tuple[str, str, list[int]]:
        return spec.name, spec.dtype, [size for size in spec.shape if size != 1]

    return [*map(plain, given)] == [*map(plain, wanted)]


def inputs_named(names: Sequence[str]) -> InputsOfInfer:
    """The inputs with these names, in this order. Raises ArtifactError if there are none."""
    for inputs in (*MAPPING.values(), IDS):
        if inputs.names == tuple(names):
            return inputs
    known = sorted({f"({', '.join(inputs.names)})" for inputs in MAPPING.values()})
    raise ArtifactError(
        f"a pair of graphs with the inputs ({', '.join(names)}), expected {' or '.join(known)}",
        "lite_runner.register_inputs adds others",
    )


Array = NDArray[np.float32]
Ints64 = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """A size of the graph."""

    rows: int  # B
    tokens: int  # S
    past: int  # P, at least 1


def not_resizable(model: Decoder) -> list[str]:
    """Reasons why the layout resizable does not support a model; empty if it does."""
    if custom_network(model) is not None:
        return [f"{model.architecture} has a custom network"]
    reasons = []
    attentions = {replace(one.attention, window=None, rotary=None) for one in model.blocks}
    if len(attentions) > 1:
        reasons.append("attention differs between its layers by more than window and positions")
    if any(not one.qk_norm_by_head for one in attentions):
        reasons.append("queries and keys are normed over all heads together")
    behind = ((one.post_norm, one.sum_norm, one.out_norm) for one in model.blocks)
    if any(map(any, behind)) or any(one.norm is None for one in model.blocks):
        reasons.append("norms follow attention and feed-forward")
    if (model.embedding_scale, model.logits_scaling) != (1.0, 1.0) or any(
        one.residual_scale != 1 or one.attention.scale is not None for one in model.blocks
    ):
        reasons.append("embeddings, scores, residual connections or logits have multipliers")
    if model.logits_softcap is not None or any(one.softcap is not None for one in attentions):
        reasons.append("scores or logits have a soft cap")
    if any(one.feed_forward.activation is not None for one in model.blocks):
        reasons.append("the feed-forward network has another activation")
    if len(model.rotaries) > 1:
        reasons.append("rotary positions differ between its layers")
    if any(one.normed_residual is not None for one in model.blocks):
        reasons.append("residual connections start from normed values")
    if any(one.parallel for one in model.blocks):
        reasons.append("attention and feed-forward are parallel")
    if model.prefix is not None:
        reasons.append("tokens see a prefix, keys behind their own")
    if model.sparse is not None:
        reasons.append("it has experts")
    if any(one.qk_norm is not None and one.qk_norm.kind != "rms" for one in attentions):
        reasons.append("queries and keys have another norm than RMSNorm")
    if any(one.qk_norm_late or one.qk_norm_apart for one in attentions):
        reasons.append("queries and keys are normed after RoPE, or by weights of each head")
    if any(one.latent is not None for one in attentions):
        reasons.append("attention is latent")
    if len({one.scale for one in attentions}) > 1:
        reasons.append("its layers scale scores differently")
    if any(one.clip is not None for one in attentions):
        reasons.append("queries, keys and values are clipped")
    if any(one.sinks for one in attentions):
        reasons.append("attention has sinks")
    if model.head_bias or model.position_offset:
        reasons.append("its head has a bias, or its positions do not begin with the first row")
    norms = [(one.norm, one.feed_forward.gated) for one in model.blocks if one.norm is not None]
    if any((one.kind == "rms") != gated or not one.bias for one, gated in norms):
        reasons.append(
            "LayerNorm has no bias, or a gated network after it, or RMSNorm one without a gate"
        )
    return reasons


def windows_of(model: Decoder) -> tuple[int | None, ...]:
    """The distinct sliding windows; each has its own bias, in this order."""
    return tuple(dict.fromkeys(model.windows))


def bias_names(model: Decoder) -> list[str]:
    """Names of the biases, in the order of `windows_of`."""
    return [f"bias.{at}" if at else "bias" for at in range(len(windows_of(model)))]


def inputs_of(model: Decoder, shape: Shape) -> tuple[TensorSpec, ...]:
    """The inputs in the graph's order, at one shape."""
    heads, kv, dim = model.num_heads, model.n_kv_heads, model.head_dim
    count, queries = shape.rows * shape.tokens, shape.tokens * (heads // kv)
    bias_heads = kv if model.attention.alibi else 1
    bias = (shape.rows, bias_heads, queries, shape.tokens + shape.past)
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


def dynamic_inputs(model: Decoder) -> tuple[TensorSpec, ...]:
    """The inputs with -1 for each axis that depends on the shape."""
    return _dynamic_axes(inputs_of(model, Shape(1, 1, 1)), inputs_of(model, Shape(2, 3, 5)))


def dynamic_outputs(model: Decoder) -> tuple[TensorSpec, ...]:
    """The outputs with -1 for each axis that depends on the shape."""
    return _dynamic_axes(outputs_of(model, Shape(1, 1, 1)), outputs_of(model, Shape(2, 3, 5)))


def _dynamic_axes(
    at_one: Sequence[TensorSpec], other: Sequence[TensorSpec]
) -> tuple[TensorSpec, ...]:
    """-1 for each axis that differs between the two shapes."""

    def dynamic(one: TensorSpec, two: TensorSpec) -> TensorSpec:
        pairs = zip(one.shape, two.shape, strict=True)
        return replace(one, shape=tuple(a if a == b else -1 for a, b in pairs))

    return tuple(dynamic(one, two) for one, two in zip(at_one, other, strict=True))


class InputArrays:
    """The graph's input arrays, which the engine owns: fills them in place."""

    def __init__(self, model: Decoder, length: int) -> None:
        """`length`: number of position ids."""
        self.past: list[Array] = []  # the KV cache inputs: past_k.0, past_v.0, past_k.1, ..
        self._model = model
        self._positions = Positions(model, length)
        self._arrays: dict[str, NDArray[Any]] = {}

    def bind(self, arrays: Sequence[NDArray[Any]], shape: Shape) -> None:
        """Use `arrays` in the graph's order, and fill those that depend only on the shape."""
        specs = inputs_of(self._model, shape)
        self._arrays = {spec.name: array for spec, array in zip(specs, arrays, strict=True)}
        self.past = list(arrays[-2 * self._model.num_layers :])
        for name, indices in gather_indices(self._model, shape).items():
            self._arrays[name][:] = indices

    def fill(self, tokens: NDArray[np.int32], start: Ints64, length: Ints64) -> None:
        """Fill what a step adds to the cache: tokens [B, S], the position id of each row's first
        one [B], and each row's length [B] for dynamic RoPE scaling."""
        arrays, model = self._arrays, self._model
        arrays["tokens"][:] = tokens.reshape(-1)
        position_ids = start[:, None] + np.arange(tokens.shape[1])
        if model.rotary is not None:
            cos, sin = self._positions.rotary(position_ids, length)
            rotated = model.num_heads + model.n_kv_heads
            for name, angles, identity in (("cos", cos, 1.0), ("sin", sin, 0.0)):
                arrays[name][:, :rotated] = angles[:, None]
                arrays[name][:, rotated:] = identity  # values are not rotated
        if model.learned_positions:
            arrays["positions"][:] = position_ids.reshape(-1)
        count, slopes = tokens.shape[1], self._positions.slopes
        for name, window in zip(bias_names(model), windows_of(model), strict=True):
            fill_bias(arrays[name], start, count, slopes, window)

    def clear(self) -> None:
        self._arrays, self.past = {}, []


class Positions:
    """A model's rotary tables and ALiBi slopes."""

    def __init__(self, model: Decoder, length: int) -> None:
        """`length`: number of position ids."""
        self.slopes: Array | None = None  # [K, G]; None: no ALiBi
        if model.attention.alibi:
            self.slopes = (model.attention.alibi_scale * alibi_slopes(model.num_heads)).reshape(
                model.n_kv_heads, -1
            )
        if model.rotary is not None:
            self._angles = RotaryAngles(model.rotary, model.head_dim)
            self._table: tuple[Array, Array] | None = None  # None: dynamic scaling
            if self._angles.dynamic is None:
                self._table = for_halves(*self._angles.table(length))

    def rotary(self, position_ids: Ints64, length: Ints64) -> tuple[Array, Array]:
        """position_ids [B, S], length [B] -> cos and sin [n, D]; sin's first half is negated."""
        flat = position_ids.reshape(-1)
        if self._table is not None:
            cos, sin = self._table
            return cos[flat], sin[flat]
        cos, sin = self._angles.scaled(position_ids, length[:, None])
        return for_halves(cos.reshape(len(flat), -1), sin.reshape(len(flat), -1))


def gather_indices(model: Decoder, shape: Shape) -> dict[str, Ints64]:
    """The indices that gather each row's tokens and heads; they depend on the shape only.

    Per token the fused projection holds H query, K key and K value heads, in that order.
    """
    heads, kv = model.num_heads, model.n_kv_heads
    group, count = heads // kv, shape.rows * shape.tokens
    token = np.arange(count).reshape(shape.rows, 1, shape.tokens)
    first = token * (heads + 2 * kv)
    by_kv = np.arange(kv).reshape(1, kv, 1)
    k_rows = first + heads + by_kv
    queries = first[..., None] + (by_kv[..., None] * group + np.arange(group))
    mixed = np.arange(count * heads).reshape(shape.rows, kv, shape.tokens, group)
    return {
        "q_rows": queries.reshape(shape.rows, kv, -1),
        "k_rows": k_rows,
        "v_rows": k_rows + kv,
        "merge_rows": mixed.transpose(0, 2, 1, 3).reshape(-1),
        "last_rows": token[:, 0, -1],
    }


def fill_bias(
    bias: Array, start: Ints64, tokens: int, slopes: Array | None, window: int | None
) -> None:
    """Fill bias [B, 1 or K, S * G, S + P] for rows whose first new token is at position start [B].

    0 or ALiBi's for visible keys, MASKED elsewhere. The first S keys are the new ones. `window`:
    sliding window in tokens, the current one included; None: full.
    """
    rows, heads, queries, keys = bias.shape
    new, cached = np.arange(tokens), np.arange(keys - tokens)
    seen, masked = np.float32(0), np.float32(MASKED)
    values = np.empty((rows, tokens, keys), np.float32)
    values[:, :, :tokens] = np.where(new <= new[:, None], seen, masked)
    values[:, :, tokens:] = np.where(cached < start[:, None], seen, masked)[:, None]
    distance = np.empty((rows, tokens, keys), np.float32)  # key position - query position
    if slopes is not None or window is not None:
        distance[:, :, :tokens] = new - new[:, None]
        distance[:, :, tokens:] = cached - (start[:, None] + new)[:, :, None]
    if window is not None:
        values[distance <= -window] = masked
    spread = bias.reshape(rows, heads, tokens, queries // tokens, keys)
    spread[:] = values[:, None, :, None]
    if slopes is not None:
        spread += slopes[None, :, None, :, None] * distance[:, None, :, None]
