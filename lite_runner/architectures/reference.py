"""Reference implementation: the whole network in plain NumPy, without cache or batch.

It defines what a description means. Tests compare it with transformers, and every backend with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import by_expert, by_role
from lite_runner.architectures.naming import Part, Role
from lite_runner.architectures.positions import (
    PromptPrefix,
    TwoDimensionalAngles,
    alibi_slopes,
    dynamic_exponents,
    frequencies,
    long_frequencies,
    positions_of,
)
from lite_runner.architectures.spec import (
    Activation,
    Attention,
    Block,
    Decoder,
    Experts,
    FeedForward,
    Latent,
    LayerInputs,
    Norm,
    Recurrent,
    Rotary,
)

Floats = NDArray[np.float64]
Both = tuple[Floats, Floats]  # keys and values [T, kv_heads, head_dim]


def forward(
    model: Decoder,
    tensors: Mapping[str, NDArray[Any]],
    tokens: NDArray[np.int32],
    learned: NDArray[np.float32] | None = None,
) -> Floats:
    """Logits [T, vocab_size] after each of `tokens` [T]; `tensors` by canonical name, and the
    model's learned keys and values [layers, 2, kv_heads, P, head_dim].

    Matrices have the layout that `parameters` gives. Dynamic scaling uses the length T for all
    positions.
    """
    weights = Weights(model, tensors)
    x = weights["embedding", None, "weight"][tokens] * model.embedding_scale
    if model.learned_positions:
        first = model.position_offset
        x = x + weights["positions", None, "weight"][first : first + len(tokens)]
    if model.embedding_norm is not None:
        x = norm(model.embedding_norm, x, weights, "embedding_norm")
    prefix = None if model.prefix is None else PromptPrefix.of(model.prefix, tokens)
    sides = None if model.side is None else sides_of(model, model.side, x, tokens, weights)
    kept: dict[int, Both] = {}  # keys and values of the layers
    for layer, block in enumerate(model.blocks):
        start = x
        if block.only != "feed_forward":
            normed = norm(block.norm, x, weights, "attention_norm", layer)
            if block.recurrent is not None:
                added = recurrent(block.recurrent, normed, weights, layer)
            else:
                ahead = None if learned is None else learned[layer].astype(np.float64)
                added = attention(block.attention, normed, weights, layer, prefix, ahead, kept)
            added = norm(block.post_norm, added, weights, "attention_post_norm", layer)
            x = residual(block, x, normed) + block.residual_scale * added
            x = norm(block.sum_norm, x, weights, "sum_norm", layer)
        if block.only != "mixer":
            start = start if block.parallel else x
            role: Role = "attention_norm" if block.shared_norm else "feed_forward_norm"
            normed = norm(block.norm, start, weights, role, layer)
            added = feed_forward(block, normed, weights, layer, start)
            added = norm(block.post_norm, added, weights, "feed_forward_post_norm", layer)
            x = residual(block, x, normed) + block.residual_scale * added
            x = norm(block.out_norm, x, weights, "out_norm", layer)
        if model.side is not None and sides is not None:
            gate = linear(x, weights, "side_gate", layer, bias=False)
            inner = activated(block.feed_forward.function, gate) * sides[:, layer]
            added = linear(inner, weights, "side_out", layer, bias=False)
            x = x + norm(model.side.norm, added, weights, "side_out_norm", layer)
        if block.scaled:
            x = x * weights["block_scale", layer, "weight"]
    head: Role = "embedding" if model.tie_word_embeddings else "head"
    logits = norm(model.norm, x, weights, "norm") @ weights[head, None, "weight"].T
    if model.head_bias:
        logits = logits + weights["head", None, "bias"]
    return capped(logits / model.logits_scaling, model.logits_softcap)


def sides_of(
    model: Decoder, side: LayerInputs, x: Floats, tokens: NDArray[np.int32], weights: Weights
) -> Floats:
    """The numbers [T, layers, width] of tokens [T] with embeddings x for each layer."""
    shape = (len(tokens), model.num_layers, side.width)
    table = weights["side_table", None, "weight"][tokens] * side.width**0.5
    inward = x @ weights["side_inward", None, "weight"].T * model.hidden_size**-0.5
    normed = norm(side.norm, inward.reshape(shape), weights, "side_norm")
    summed: Floats = (normed + table.reshape(shape)) * 2**-0.5
    return summed


def capped(x: Floats, softcap: float | None) -> Floats:
    """Between -softcap and softcap; None: x itself."""
    return x if softcap is None else softcap * np.tanh(x / softcap)


_KINDS: tuple[Part, ...] = ("weight", "bias")


class Weights:
    """Tensors by role, layer and kind, in float64; matrices are [out, in]."""

    def __init__(self, model: Decoder, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._all = {
            key: tensors[one.name].T if one.transposed else tensors[one.name]
            for key, one in by_role(model).items()
        }

        self._experts = {
            (*key, kind): [tensors[one.name] for one in every]
            for kind in _KINDS
            for key, every in by_expert(model, kind).items()
        }

    def expert(self, role: Role, layer: int, expert: int, kind: Part = "weight") -> Floats:
        """Matrix of an expert, or its bias."""
        return self._experts[(role, layer, kind)][expert].astype(np.float64)

    def __getitem__(self, key: tuple[Role, int | None, Part]) -> Floats:
        return self._all[key].astype(np.float64)


def linear(x: Floats, weights: Weights, role: Role, layer: int, bias: bool) -> Floats:
    """x [T, in] -> [T, out]"""
    out = x @ weights[role, layer, "weight"].T
    return out + weights[role, layer, "bias"] if bias else out


def norm(
    given: Norm | None, x: Floats, weights: Weights, role: Role, layer: int | None = None
) -> Floats:
    """Along the last axis; None: x itself."""
    if given is None:
        return x
    if given.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    scaled: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + given.eps)
    if not given.gain:
        return scaled
    gain = weights[role, layer, "weight"].reshape(-1, x.shape[-1])  # or one of each head
    scaled = scaled * (gain if len(gain) > 1 else gain[0])
    biased = given.kind == "layer" and given.bias
    return scaled + weights[role, layer, "bias"] if biased else scaled


def residual(block: Block, x: Floats, normed: Floats) -> Floats:
    """The residual connection, to which a layer's output is added."""
    return x if block.normed_residual is None else block.normed_residual * normed


def attention(
    given: Attention,
    x: Floats,
    weights: Weights,
    layer: int,
    prefix: PromptPrefix | None = None,
    learned: Floats | None = None,
    kept: dict[int, Both] | None = None,
) -> Floats:
    """x [T, hidden_size] -> [T, hidden_size], with learned keys and values [2, kv_heads, P,
    head_dim] that every token sees. `kept`: what layers before have kept, and this one keeps."""

    def heads(role: Role, count: int) -> Floats:
        """[T, count, head_dim]"""
        placed = given.placed_query and role == "query"
        rows = weights["query_places", layer, "weight"][: len(x)] if placed else x
        projected = linear(rows, weights, role, layer, given.qkv_bias)
        return projected.reshape(len(x), count, given.head_dim)

    def normed(split: Floats, role: Role) -> Floats:
        if given.qk_norm_by_head:
            return norm(given.qk_norm, split, weights, role, layer)
        together = norm(given.qk_norm, split.reshape(len(x), -1), weights, role, layer)
        return together.reshape(split.shape)

    if given.latent is not None:
        return latent_attention(given, given.latent, x, weights, layer)

    def moved(split: Floats, role: Role) -> Floats:
        """Queries or keys with their norm, bound and position."""
        split = split if given.qk_norm_late else normed(split, role)
        if given.clip is not None:
            split = np.clip(split, -given.clip, given.clip)
        if given.rotary is not None:
            split = apply_rotary(given.rotary, split, prefix)
        return normed(split, role) if given.qk_norm_late else split

    query = heads("query", given.heads * (1 + given.gated))
    query, gates = query[:, : given.heads], query[:, given.heads :]
    query = moved(query, "query_norm")
    if given.borrowed is not None:
        assert kept is not None
        key, value = kept[given.borrowed]
    else:
        key = heads("key", given.kv_heads)
        value = key if given.values_are_keys else heads("value", given.kv_heads)
        value = norm(given.value_norm, value, weights, "value", layer)
        if given.clip is not None:
            value = np.clip(value, -given.clip, given.clip)
        key = moved(key, "key_norm")
    if kept is not None:
        kept[layer] = key, value
    if given.temperature is not None:
        spans = np.floor((np.arange(len(x)) + 1) / given.temperature.span)
        query = query * (1 + given.temperature.weight * np.log1p(spans))[:, None, None]
    ahead = 0 if learned is None else learned.shape[2]
    if learned is not None:
        key, value = (
            np.concatenate([first.swapaxes(0, 1), own])
            for first, own in zip(learned, (key, value), strict=True)
        )
    # Grouped-query attention: consecutive query heads share a key/value head.
    key, value = (np.repeat(one, given.heads // given.kv_heads, axis=1) for one in (key, value))
    scale = given.head_dim**-0.5 if given.scale is None else given.scale
    # With the summed axis contiguous einsum is three times as fast.
    query, key = (np.ascontiguousarray(np.moveaxis(one, 1, 0)) for one in (query, key))
    scores = capped(np.einsum("hqd,hkd->hqk", query, key) * scale, given.softcap)
    # Query position - key position; learned keys have none, and are seen as that of a token itself.
    distance = np.arange(len(x))[:, None] - np.arange(-ahead, len(x))
    distance = np.where(np.arange(-ahead, len(x)) < 0, 0, distance)
    if given.alibi:
        slopes = alibi_slopes(given.heads) * given.alibi_scale
        scores = scores - slopes[:, None, None] * distance
    visible = distance >= 0
    if given.window is not None:
        visible &= distance < given.window
    if given.chunk is not None:
        visible &= np.arange(len(x)) >= (np.arange(len(x)) // given.chunk * given.chunk)[:, None]
    if prefix is not None:
        visible |= np.arange(len(x)) < prefix.length
    scores = np.where(visible, scores, -np.inf)
    if given.sinks:
        sinks = weights["sinks", layer, "weight"][:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], -1)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities = (probabilities / probabilities.sum(-1, keepdims=True))[..., : len(value)]
    mixed = np.einsum("hqk,hdk->qhd", probabilities, np.ascontiguousarray(np.moveaxis(value, 0, 2)))
    if given.gated:
        mixed = mixed * sigmoid(gates)
    return linear(mixed.reshape(len(x), -1), weights, "attention_out", layer, given.out_bias)


def recurrent(given: Recurrent, x: Floats, weights: Weights, layer: int) -> Floats:
    """x [T, hidden_size] -> [T, hidden_size]"""
    raw = linear(x, weights, "recurrent_in", layer, given.bias)
    taps = weights["recurrent_taps", layer, "weight"][:, 0]
    padded = np.concatenate([np.zeros((given.kernel - 1, given.channels)), raw])
    convolved = sum(taps[:, tap] * padded[tap : tap + len(x)] for tap in range(given.kernel))
    if given.conv_bias:
        convolved = convolved + weights["recurrent_taps", layer, "bias"]
    convolved = activated("silu", np.asarray(convolved))
    keys = given.key_heads * given.key_dim
    parts = np.split(convolved, [keys, 2 * keys], axis=1)
    group = given.heads // given.key_heads
    query, key = (
        np.repeat(one.reshape(len(x), given.key_heads, -1), group, axis=1) for one in parts[:2]
    )
    value = parts[2].reshape(len(x), given.heads, -1)
    logits = linear(x, weights, "recurrent_decay", layer, given.bias)
    rates = np.logaddexp(0, logits + weights["recurrent_rate", layer, "weight"])
    if given.delta:
        query, key = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (query, key))
        query = query / np.sqrt(given.key_dim)
        written = sigmoid(linear(x, weights, "recurrent_beta", layer, bias=False))
    else:
        written = rates
    kept = np.exp(-np.exp(weights["recurrent_log", layer, "weight"]) * rates)
    state, out = np.zeros((given.heads, given.key_dim, given.value_dim)), np.zeros_like(value)
    for token in range(len(x)):
        state *= kept[token, :, None, None]
        added = value[token]
        if given.delta:
            added = added - np.einsum("hk,hkv->hv", key[token], state)
        state += np.einsum("hk,hv->hkv", key[token], added * written[token, :, None])
        out[token] = np.einsum("hk,hkv->hv", query[token], state)
    if not given.delta:
        out += value * weights["recurrent_skip", layer, "weight"][:, None]
    gates = activated("silu", linear(x, weights, "recurrent_gate", layer, given.bias))
    grouped = (out.reshape(len(x), -1) * (1 if given.delta else gates)).reshape(
        len(x), given.groups, -1
    )
    scaled = grouped / np.sqrt((grouped**2).mean(-1, keepdims=True) + given.norm.eps)
    scaled = scaled * weights["recurrent_gain", layer, "weight"].reshape(-1, scaled.shape[-1])
    mixed = scaled.reshape(len(x), -1) * (gates if given.delta else 1)
    return linear(mixed, weights, "recurrent_out", layer, given.bias)


def latent_attention(
    given: Attention, latent: Latent, x: Floats, weights: Weights, layer: int
) -> Floats:
    """x [T, hidden_size] -> [T, hidden_size], with keys and values of each head."""
    queries = x
    if latent.query_rank is not None:
        queries = linear(x, weights, "latent_query", layer, given.qkv_bias)
        queries = norm(latent.norm, queries, weights, "latent_query_norm", layer)
    query = linear(queries, weights, "query", layer, bias=False).reshape(len(x), given.heads, -1)
    both = linear(x, weights, "latent", layer, given.qkv_bias)
    kept, rotated_key = np.split(both, [latent.rank], axis=1)
    kept = norm(latent.norm, kept, weights, "latent_norm", layer)
    wide = linear(kept, weights, "latent_values", layer, bias=False)
    plain_key, value = np.split(wide.reshape(len(x), given.heads, -1), [latent.plain], axis=-1)
    plain_query, rotated_query = np.split(query, [latent.plain], axis=-1)
    assert given.rotary is not None and given.scale is not None
    own = replace(given.rotary, dims=None)
    rotated_query = apply_rotary(own, rotated_query)
    rotated_key = apply_rotary(own, rotated_key[:, None])[:, 0]
    scores = np.einsum("qhd,khd->hqk", plain_query, plain_key)
    scores = (scores + np.einsum("qhd,kd->hqk", rotated_query, rotated_key)) * given.scale
    scores = np.where(np.arange(len(x))[:, None] >= np.arange(len(x)), scores, -np.inf)
    probabilities = np.exp(scores - scores.max(-1, keepdims=True))
    probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", probabilities, value).reshape(len(x), -1)
    return linear(mixed, weights, "attention_out", layer, given.out_bias)


def apply_rotary(rotary: Rotary, x: Floats, prefix: PromptPrefix | None = None) -> Floats:
    """x [T, heads, head_dim] with the pairs (d, d + head_dim / 2) rotated by position, those of
    d >= dims / 2 by nothing."""
    length, head_dim = len(x), x.shape[-1]
    if rotary.two_dimensional:
        where = prefix or PromptPrefix()
        both = positions_of(np.arange(length), np.array(where.length), np.array(where.mask))
        cos, sin = TwoDimensionalAngles(rotary, head_dim, length).of(*both)
        return rotated(x, cos[:, None], sin[:, None])
    speeds, factor = frequencies(rotary, head_dim)
    scaling = rotary.scaling
    if scaling is not None and length > scaling.original_seq_length:
        if scaling.type == "dynamic":
            ratio = scaling.factor * length / scaling.original_seq_length - (scaling.factor - 1)
            speeds = speeds * ratio ** dynamic_exponents(head_dim)
        if scaling.type == "longrope":
            speeds = long_frequencies(rotary, head_dim)
    angles = np.outer(np.arange(length), speeds)[:, None, :]
    return rotated(x, np.cos(angles) * factor, np.sin(angles) * factor)


def rotated(x: Floats, cos: NDArray[Any], sin: NDArray[Any]) -> Floats:
    """x [T, heads, head_dim] by cos and sin [T, 1, head_dim / 2]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def feed_forward(block: Block, x: Floats, weights: Weights, layer: int, unnormed: Floats) -> Floats:
    """x [T, hidden_size] -> [T, hidden_size]; `unnormed`: what x is the norm of."""
    given = block.feed_forward
    if given.experts is not None:
        return mixture(block, given.experts, x, weights, layer, unnormed)
    product = partial(linear, x, weights, layer=layer, bias=given.bias)
    inner = widened(given, product, "gate", "up")
    return linear(inner, weights, "down", layer, given.biased_down)


def widened(given: FeedForward, product: Callable[[Role], Floats], gate: Role, up: Role) -> Floats:
    """The input of `down`, from the products with up, and with gate if there is one."""
    if given.gated:
        return gated(given, product(gate), product(up))
    return activated(given.function, product(up))


def gated(given: FeedForward, gate: Floats, up: Floats) -> Floats:
    if given.limit is None:
        return activated(given.function, gate) * up
    gate, up = np.minimum(gate, given.limit), np.clip(up, -given.limit, given.limit)
    return activated(given.function, gate) * (up + 1)


def activated(function: Activation, x: Floats) -> Floats:
    if function in ("relu", "relu_squared"):
        positive: Floats = np.maximum(x, 0)
        return positive if function == "relu" else positive**2
    if function == "gelu_exact":
        error: Floats = np.vectorize(math.erf, [np.float64])(x / math.sqrt(2))
        return x * (1 + error) / 2
    if function == "quick_gelu":
        quick: Floats = 1 / (1 + np.exp(-1.702 * x))
        return x * quick
    if function == "silu":
        return x * sigmoid(x)
    cubic: Floats = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * (1 + np.tanh(cubic)) / 2


def mixture(
    block: Block, experts: Experts, x: Floats, weights: Weights, layer: int, unnormed: Floats
) -> Floats:
    """x [T, hidden_size] -> [T, hidden_size]; of equally probable experts the first is chosen."""
    given, inward, routed = block.feed_forward, x, x  # of the shared network, and the router
    if experts.apart:
        assert block.norm is not None
        plain = replace(block.norm, gain=False)
        routed = norm(plain, unnormed, weights, "router_scale", layer) * x.shape[-1] ** -0.5
        routed = routed * weights["router_scale", layer, "weight"]
        x = norm(block.norm, unnormed, weights, "expert_norm", layer)
    logits = linear(routed, weights, "router", layer, experts.router_bias)
    if experts.sigmoid:
        probabilities = sigmoid(logits)
    else:
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    scores = probabilities
    if experts.choice_bias:
        scores = scores + weights["choice_bias", layer, "bias"]
    if experts.groups > 1:
        grouped = scores.reshape(len(x), experts.groups, -1)
        best = np.sort(grouped, axis=-1)[..., -experts.best_of_group :].sum(-1)
        taken = np.argsort(-best, axis=-1, kind="stable")[:, : experts.chosen_groups]
        allowed = np.zeros_like(best, bool)
        np.put_along_axis(allowed, taken, True, axis=-1)
        scores = np.where(allowed[..., None], grouped, -np.inf).reshape(len(x), -1)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : experts.chosen]
    factors = np.take_along_axis(probabilities, chosen, axis=-1)  # [T, chosen]
    if experts.renormalized:
        factors = factors / factors.sum(-1, keepdims=True)
    factors = factors * experts.scale
    if experts.apart:
        factors = factors * weights["expert_scales", layer, "weight"][chosen]

    def multiplied(rows: Floats, role: Role, expert: int) -> Floats:
        y = rows @ weights.expert(role, layer, expert).T
        biased = given.biased_down if role == "expert_down" else given.bias
        return y + weights.expert(role, layer, expert, "bias") if biased else y

    out = np.zeros_like(x)
    for expert in range(experts.count):
        rows, place = np.nonzero(chosen == expert)
        factor = factors[rows, place, None]
        inputs = x[rows] * factor if experts.scaled_inputs else x[rows]
        product = partial(multiplied, inputs, expert=expert)
        inner = widened(given, product, "expert_gate", "expert_up")
        added = multiplied(inner, "expert_down", expert)
        out[rows] += added if experts.scaled_inputs else factor * added
    if experts.apart:
        out = norm(block.norm, out, weights, "expert_out_norm", layer)
    if experts.shared:
        product = partial(linear, inward, weights, layer=layer, bias=False)
        inner = widened(given, product, "shared_gate", "shared_up")
        added = linear(inner, weights, "shared_down", layer, bias=False)
        if experts.shared_gate:
            added = added * sigmoid(linear(x, weights, "shared_router", layer, bias=False))
        if experts.apart:
            added = norm(block.norm, added, weights, "shared_out_norm", layer)
        out += added
    return out


def sigmoid(x: Floats) -> Floats:
    found: Floats = 1 / (1 + np.exp(-x))
    return found
