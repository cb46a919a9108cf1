"""The operators as MindSpore calls them, against NumPy in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.kernels import packing
from lite_runner.kernels.packing import Norm
from lite_runner.weights.quantized import QuantizedTensor, quantize
from lite_runner.weights.tensor import narrowed, widened

LENGTH = 384  # positions of a slot: three chunks of keys
SLOTS = 3
CAPACITY = 500
CACHES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}
# Numbers are around one, and go through a few hundred roundings of 6e-8 each.
CLOSE = 2e-5
# What multiplies integers is rounded to 16 bits, of the largest in a group: that adds up over the
# inputs of a product as a random walk does.
CLOSE_INTEGERS = 2e-4
BASE = np.full(1, -1, np.int32)  # places of adapters: none is looked at
NO_ROPE = np.zeros((1, 1), np.float32)

Wide = NDArray[np.float64]
Floats = NDArray[np.float32]


def close(kind: str) -> float:
    return CLOSE_INTEGERS if kind in ("int8", "int4") else CLOSE


def a_norm(size: int, centred: bool, rng: np.random.Generator) -> Norm:
    gamma = rng.standard_normal(size, np.float32)
    return Norm(gamma, rng.standard_normal(size, np.float32) if centred else None, 1e-5)


def normed(x: Floats, norm: Norm) -> Wide:
    wide = x.astype(np.float64)
    if norm.beta is not None:
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + norm.epsilon) * norm.gamma
    return wide if norm.beta is None else wide + norm.beta


def a_matrix(out: int, inputs: int, kind: str, rng: np.random.Generator) -> packing.Weight:
    weight = rng.standard_normal((out, inputs), np.float32) / np.float32(np.sqrt(inputs))
    if kind == "int8":
        return quantize(weight, 8, 0)
    if kind in ("float16", "bfloat16"):
        return narrowed(weight, "F16" if kind == "float16" else "BF16")
    return quantize(weight, 4, 32) if kind == "int4" and inputs % 32 == 0 else weight


def values(weight: packing.Weight) -> Wide:
    plain = weight.float32() if isinstance(weight, QuantizedTensor) else widened(weight)
    return plain.astype(np.float64)


def step_words(
    capacity: int,
    slots: NDArray[Any],
    positions: NDArray[Any],
    tokens: NDArray[Any] | None = None,
    wanted: tuple[int, ...] = (),
) -> NDArray[np.int32]:
    """A step as layers.h describes it; what is not live is what no operator may look at."""
    words = np.full(2 + 4 * capacity + len(wanted) + 3, 0x7FFFFFF0, np.int32)
    count = len(slots)
    words[:2] = count, len(wanted)
    rows = words[2 : 2 + 4 * capacity].reshape(4, capacity)[:, :count]
    rows[0] = 0 if tokens is None else tokens
    rows[1], rows[2], rows[3] = slots, positions, positions
    words[2 + 4 * capacity :][: len(wanted)] = wanted
    return words


@dataclass
class Layer:
    """An attention layer with random weights, and the cache of its slots."""

    hidden: int
    kv_heads: int
    group: int
    dim: int
    rotary: bool
    alibi: bool
    bias: bool
    residual: bool
    centred: bool
    cache: str
    weights: str
    integer_input: bool = False
    seed: int = 0
    block: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.heads = self.kv_heads * self.group
        self.norm = a_norm(self.hidden, self.centred, rng)
        inward = (self.heads + 2 * self.kv_heads) * self.dim
        self.inward = a_matrix(inward, self.hidden, self.weights, rng)
        self.outward = a_matrix(self.hidden, self.heads * self.dim, self.weights, rng)
        self.biases = rng.standard_normal(inward, np.float32) if self.bias else None
        self.slopes = rng.random(self.heads, np.float32) if self.alibi else None
        angles = np.outer(np.arange(LENGTH), rng.random(self.dim // 2))
        self.rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.x = rng.standard_normal((SLOTS, LENGTH, self.hidden), np.float32)
        self.block = packing.attention(
            (self.heads, self.kv_heads, self.dim),
            packing.matrix(self.inward, self.biases, integer_input=self.integer_input),
            packing.matrix(self.outward, integer_input=self.integer_input),
            self.norm,
            None,
            hidden=self.hidden,
            rotary=self.rotary,
            residual=self.residual,
            slopes=self.slopes,
        ).block()

    def fresh_cache(self) -> list[NDArray[Any]]:
        """Keys, values and their scales, full of what must not matter."""
        places, panels, dtype = SLOTS * self.kv_heads, -(-self.dim // 32), CACHES[self.cache]
        filler = 111 if self.cache == "int8" else np.nan
        scales = (places, LENGTH) if self.cache == "int8" else (1, 1)
        return [
            np.full((places, LENGTH // 32, self.dim, 32), filler, dtype),
            np.full((places, panels, LENGTH, 32), filler, dtype),
            np.full(scales, np.nan, np.float32),
            np.full(scales, np.nan, np.float32),
        ]

    def run(
        self, operators: Any, cache: list[NDArray[Any]], slots: list[int], positions: list[int]
    ) -> Floats:
        """One step over some tokens -> [len(slots), hidden]."""
        count = len(slots)
        x = np.full((CAPACITY, self.hidden), np.nan, np.float32)
        x[:count] = self.x[slots, positions]
        step = step_words(CAPACITY, np.array(slots), np.array(positions))
        shape = (CAPACITY, self.hidden)
        result = operators.call("Layers", x, step, self.rope, BASE, self.block, *cache, shape=shape)
        assert np.isnan(result[count:]).all()
        return result[:count]

    def rotated(self, heads: Wide, positions: NDArray[Any]) -> Wide:
        """heads [tokens, heads, dim]."""
        if not self.rotary:
            return heads
        half = self.dim // 2
        cos, sin = (self.rope[positions][:, None, i : i + half] for i in (0, half))
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def expected(self, cache: list[NDArray[Any]], slot: int, count: int) -> Wide:
        """Outputs of the first tokens of a slot [count, hidden], whose keys and values are in the
        cache: these are checked too, and then taken as they are."""
        positions = np.arange(count)
        fused = normed(self.x[slot, :count], self.norm) @ values(self.inward).T
        fused = fused if self.biases is None else fused + self.biases
        fused = fused.reshape(count, -1, self.dim)
        query = self.rotated(fused[:, : self.heads], positions)
        key = self.rotated(fused[:, self.heads : -self.kv_heads], positions)
        mine = slice(slot * self.kv_heads, (slot + 1) * self.kv_heads)
        held = [
            cache[0][mine].transpose(0, 1, 3, 2).reshape(self.kv_heads, LENGTH, self.dim),
            cache[1][mine]
            .transpose(0, 2, 1, 3)
            .reshape(self.kv_heads, LENGTH, -1)[..., : self.dim],
        ]
        found = []
        for stored, scales, exact in zip(
            held, cache[2:], (key, fused[:, -self.kv_heads :]), strict=True
        ):
            wide = stored[:, :count].transpose(1, 0, 2).astype(np.float64)
            if self.cache == "int8":
                scale = scales[mine, :count].T[..., None]
                rtol = 5 * close(self.weights)
                np.testing.assert_allclose(scale[..., 0], abs(exact).max(-1) / 127, rtol=rtol)
                wide = wide * scale
                room = 0.5 * scale
            else:
                room = abs(exact) * (2.0**-11 if self.cache == "fp16" else 0)
            assert (abs(wide - exact) <= room * 1.001 + 5 * close(self.weights)).all()
            found.append(wide.repeat(self.group, 1))
        scores = np.einsum("qhd,khd->hqk", query, found[0]) / np.sqrt(self.dim)
        if self.slopes is not None:
            distance = positions - positions[:, None]
            scores = scores + self.slopes[:, None, None] * distance
        scores = np.where(positions <= positions[:, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, found[1]).reshape(count, -1)
        out = mixed @ values(self.outward).T
        return out + self.x[slot, :count] if self.residual else out


Schedule = list[list[tuple[int, int]]]  # steps of (slot, position)


def schedule(counts: list[int], rng: np.random.Generator, most: int) -> Schedule:
    """Random steps in which the slots get their tokens, up to `most` of a slot at a time."""
    done = [0] * SLOTS
    steps = []
    while done != counts:
        step = []
        for slot in rng.permutation(SLOTS).tolist():
            left = counts[slot] - done[slot]
            # Prompts, parts of them, and single tokens.
            take = min(left, int(rng.choice([0, 1, 1, 40, most])), CAPACITY - len(step))
            step += [(slot, done[slot] + i) for i in range(take)]
            done[slot] += take
        if step:
            steps.append(step)
    return steps


def outputs(layer: Layer, operators: Any, steps: Schedule) -> tuple[Floats, list[NDArray[Any]]]:
    """Outputs by slot and position, and the cache."""
    cache = layer.fresh_cache()
    found = np.zeros((SLOTS, LENGTH, layer.hidden), np.float32)
    for step in steps:
        slots, positions = [s for s, _ in step], [p for _, p in step]
        found[slots, positions] = layer.run(operators, cache, slots, positions)
    return found, cache


layers = st.builds(
    Layer,
    hidden=st.sampled_from([1, 8, 33, 64, 96]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([8, 16, 40, 64, 80, 128]),
    rotary=st.booleans(),
    alibi=st.booleans(),
    bias=st.booleans(),
    residual=st.booleans(),
    centred=st.booleans(),
    cache=st.sampled_from(sorted(CACHES)),
    weights=st.sampled_from(["float32", "int8", "int4"]),
    seed=st.integers(0, 1000),
)
# One slot at least goes over several chunks.
counts = st.tuples(st.integers(1, 10), st.integers(1, 130), st.sampled_from([128, 129, 300, 384]))


def test_attention(operators: Any) -> None:
    @settings(max_examples=settings().max_examples // 4)
    @given(layer=layers, counts=counts, threads=st.sampled_from([1, 2, 5]))
    def check(layer: Layer, counts: tuple[int, int, int], threads: int) -> None:
        operators.set_threads(threads)
        rng = np.random.default_rng(layer.seed)
        found, cache = outputs(layer, operators, schedule(list(counts), rng, 200))
        for slot, count in enumerate(counts):
            expected = layer.expected(cache, slot, count)
            np.testing.assert_allclose(
                found[slot, :count],
                expected,
                rtol=0,
                atol=close(layer.weights) * (1 + abs(expected).max()),
            )

    check()


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("weights", ["float32", "int8", "int4", "integers"])
def test_attention_is_the_same_however_a_prompt_is_split(
    operators: Any, weights: str, cache: str
) -> None:
    """To the last bit: as single tokens, as one prompt, in parts; with any number of threads."""
    integers = weights == "integers"
    layer = Layer(
        *(64, 2, 3, 40, True, True, True, True, False),
        cache=cache,
        weights="int8" if integers else weights,
        integer_input=integers,
    )
    counts = [5, 131, 300]
    every = [(slot, p) for slot, count in enumerate(counts) for p in range(count)]
    operators.set_threads(1)
    first, held = outputs(layer, operators, [[one] for one in every])
    assert np.isfinite(first).all() and first[2, 299].any()
    rng = np.random.default_rng(0)
    for threads, steps in (
        (2, [every]),
        (5, schedule(counts, rng, 7)),
        (2, schedule(counts, rng, 150)),
    ):
        operators.set_threads(threads)
        found, other = outputs(layer, operators, steps)
        np.testing.assert_array_equal(found, first)
        for one, two in zip(held, other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_a_step_may_be_empty(operators: Any) -> None:
    layer = Layer(16, 2, 2, 16, True, False, False, True, False, cache="fp32", weights="float32")
    held = layer.fresh_cache()
    assert layer.run(operators, held, [], []).shape == (0, 16)
    assert np.isnan(held[0]).all()


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_a_slot_is_used_again(operators: Any, cache: str) -> None:
    """What a longer row has left in the cache does not matter to the next."""
    layer = Layer(16, 2, 2, 16, True, False, False, True, False, cache=cache, weights="float32")
    alone, _ = outputs(layer, operators, [[(1, p) for p in range(140)], [(1, 140)]])
    held = layer.fresh_cache()
    layer.x[0] *= 100
    layer.run(operators, held, [0] * LENGTH, list(range(LENGTH)))
    layer.x[0] = layer.x[1]
    again = layer.run(operators, held, [0] * 140, list(range(140)))
    np.testing.assert_array_equal(again, alone[1, :140])
    last = layer.run(operators, held, [0], [140])
    np.testing.assert_array_equal(last[0], alone[1, 140])


@pytest.mark.parametrize("cache", sorted(CACHES))
def test_a_token_that_is_no_number_stays_in_its_slot(operators: Any, cache: str) -> None:
    layer = Layer(16, 2, 2, 16, True, False, False, True, False, cache=cache, weights="float32")
    every = [(slot, p) for slot in range(SLOTS) for p in range(150)]
    before, _ = outputs(layer, operators, [every, [(1, 150)]])
    layer.x[1, 140, 3] = np.nan
    after, _ = outputs(layer, operators, [every, [(1, 150)]])
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert np.isnan(after[1, 140:151]).all()  # all that see it
    np.testing.assert_array_equal(after[1, :90], before[1, :90])


@pytest.mark.parametrize("cache", sorted(CACHES))
@pytest.mark.parametrize("which", [0, 127, 128, 255, 256, 299])
@pytest.mark.parametrize("together", [1, 30])
def test_a_key_that_is_no_number_is_not_passed_over(
    operators: Any, cache: str, which: int, together: int
) -> None:
    """Such as an overflow of float16 makes: the values alone would be numbers."""
    layer = Layer(16, 1, 2, 16, True, False, False, True, False, cache=cache, weights="float32")
    held = layer.fresh_cache()
    layer.run(operators, held, [0] * 300, list(range(300)))
    if cache == "int8":
        held[2][0, which] = np.nan
    else:
        held[0][0, which // 32, :, which % 32] = np.nan
    after = layer.run(operators, held, [0] * together, list(range(300, 300 + together)))
    assert np.isnan(after).all()


@dataclass(frozen=True)
class FeedForward:
    """What the layers of the test differ in."""

    gated: bool
    centred: bool
    residual: bool
    bias: bool
    hidden: int
    wide: int
    kind: str


feed_forwards = st.builds(
    FeedForward,
    hidden=st.sampled_from([1, 8, 40, 64]),
    wide=st.sampled_from([1, 31, 32, 33, 64, 100, 160]),
    kind=st.sampled_from(["float32", "float16", "int8", "int4"]),
)
row_counts = st.one_of(st.integers(1, 5), st.integers(1, 70))


def test_feed_forward(operators: Any) -> None:
    @given(layer=feed_forwards, count=row_counts, threads=st.sampled_from([1, 2, 5]))
    def check(layer: FeedForward, count: int, threads: int) -> None:
        rng = np.random.default_rng(layer.wide)
        operators.set_threads(threads)
        hidden, wide = layer.hidden, layer.wide
        norm = a_norm(hidden, layer.centred, rng)
        ups = [a_matrix(wide, hidden, layer.kind, rng) for _ in range(1 + layer.gated)]
        down = a_matrix(hidden, wide, layer.kind, rng)
        up_bias, down_bias = (
            rng.standard_normal(size, np.float32) if layer.bias else None for size in (wide, hidden)
        )
        if layer.gated:
            up_bias = None
        block = packing.feed_forward(
            packing.matrix(packing.Alternating(*ups) if layer.gated else ups[0], up_bias),
            packing.matrix(down, down_bias),
            norm,
            None,
            hidden=hidden,
            wide=wide,
            gated=layer.gated,
            residual=layer.residual,
        ).block()
        x = np.full((CAPACITY, hidden), np.nan, np.float32)
        x[:count] = rng.standard_normal((count, hidden), np.float32)
        step = step_words(CAPACITY, np.zeros(count), np.arange(count))
        result = operators.call("Layers", x, step, NO_ROPE, BASE, block, shape=x.shape)
        assert np.isnan(result[count:]).all()
        inner = [normed(x[:count], norm) @ values(up).T for up in ups]
        if layer.gated:
            middle = inner[0] / (1 + np.exp(-inner[0])) * inner[1]
        else:
            middle = gelu(inner[0] if up_bias is None else inner[0] + up_bias)
        expected = middle @ values(down).T
        expected = expected if down_bias is None else expected + down_bias
        expected = expected + x[:count] if layer.residual else expected
        room = close(layer.kind) * (1 + abs(expected).max())
        np.testing.assert_allclose(result[:count], expected, rtol=0, atol=room)
        # The last row is the same alone.
        last = np.ascontiguousarray(x[count - 1 : count])
        step = step_words(1, np.zeros(1), np.zeros(1))
        alone = operators.call("Layers", last, step, NO_ROPE, BASE, block, shape=last.shape)
        np.testing.assert_array_equal(alone[0], result[count - 1])

    check()


def gelu(x: Wide) -> Wide:
    """x (1 + tanh(a)) / 2, in a form that keeps its digits where that is near 0."""
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def activations(operators: Any, inputs: Floats, gated: bool) -> Floats:
    """silu(inputs) or gelu(inputs), through a layer whose only weights are ones that pass on what
    becomes of its biases."""
    size = len(inputs)
    zeros = np.zeros((size, size), np.float32)
    bias = inputs
    if gated:  # the biases of gate and up, 32 of each in turn
        missing = (0, -size % 32)
        pair = [np.pad(one, missing).reshape(-1, 32) for one in (inputs, np.ones_like(inputs))]
        bias = np.stack(pair, axis=1).reshape(-1)
    block = packing.feed_forward(
        packing.matrix(packing.Alternating(zeros, zeros) if gated else zeros, bias),
        packing.matrix(np.eye(size, dtype=np.float32)),
        Norm(np.ones(size, np.float32), None, 1.0),
        None,
        hidden=size,
        wide=size,
        gated=gated,
        residual=False,
    ).block()
    x, step = np.zeros((1, size), np.float32), step_words(1, np.zeros(1), np.zeros(1))
    result: Floats = operators.call("Layers", x, step, NO_ROPE, BASE, block, shape=(1, size))[0]
    return result


@pytest.mark.parametrize("gated", [True, False])
def test_activations_are_accurate(operators: Any, gated: bool) -> None:
    rng = np.random.default_rng(0)
    for scale in (1e-6, 0.1, 1.0, 8.0, 80.0, 1e4):
        x = (rng.standard_normal(1024) * scale).astype(np.float32)
        wide = x.astype(np.float64)
        with np.errstate(over="ignore"):
            exact = wide / (1 + np.exp(-wide)) if gated else gelu(wide)
        error = abs(activations(operators, x, gated) - exact)
        # e^a takes over the rounding of a, which is some digits of it where a is large. What is
        # below 1e-30 counts as nothing.
        inner = abs(wide) if gated else abs(2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))
        units = 4 if gated else 4 + 3 * np.minimum(inner, 88) * (wide < 0)
        assert (error <= units * 2.0**-23 * abs(exact) + 1e-30).all()


@pytest.mark.parametrize("gated", [True, False])
def test_activations_of_extremes(operators: Any, gated: bool) -> None:
    for value, expected in ((1e4, 1e4), (3e38, 3e38), (np.inf, np.inf), (-1e4, 0), (0, 0)):
        found = activations(operators, np.float32([value]), gated)
        np.testing.assert_allclose(found, np.float32([expected]), rtol=1e-6, atol=1e-30)
    assert np.isnan(activations(operators, np.float32([np.nan]), gated)).all()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["float32", "int8", "integers"])
def test_no_number_reaches_the_output_of_its_row(operators: Any, kind: str, gated: bool) -> None:
    rng = np.random.default_rng(0)
    ups = [a_matrix(40, 32, kind.replace("integers", "int8"), rng) for _ in range(1 + gated)]
    down = a_matrix(32, 40, kind.replace("integers", "int8"), rng)
    block = packing.feed_forward(
        packing.matrix(
            packing.Alternating(*ups) if gated else ups[0], integer_input=kind == "integers"
        ),
        packing.matrix(down, integer_input=kind == "integers"),
        a_norm(32, False, rng),
        None,
        hidden=32,
        wide=40,
        gated=gated,
        residual=False,
    ).block()
    x = rng.standard_normal((7, 32), np.float32)
    step = step_words(7, np.zeros(7), np.arange(7))
    before = operators.call("Layers", x, step, NO_ROPE, BASE, block, shape=x.shape)
    x[3, 5] = np.nan
    after = operators.call("Layers", x, step, NO_ROPE, BASE, block, shape=x.shape)
    assert np.isnan(after[3]).all()
    np.testing.assert_array_equal(np.delete(after, 3, 0), np.delete(before, 3, 0))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("centred", [None, False, True])
@pytest.mark.parametrize("hidden", [8, 33, 64])
def test_embedding(
    operators: Any, kind: str, positions: bool, centred: bool | None, hidden: int
) -> None:
    rng = np.random.default_rng(hidden)
    table = a_matrix(101, hidden, kind, rng)
    places = rng.standard_normal((50, hidden), np.float32) if positions else None
    norm = None if centred is None else a_norm(hidden, centred, rng)
    block = packing.embedding(packing.matrix(table), places, norm, None, hidden=hidden).block()
    tokens, at = rng.integers(0, 101, 23), rng.integers(0, 50, 23)
    step = step_words(40, np.zeros(23), at, tokens)
    result = operators.call("Embedding", step, BASE, block, shape=(40, hidden))
    assert np.isnan(result[23:]).all()
    rows = values(table)[tokens]
    rows = rows if places is None else rows + places[at]
    if norm is None:
        np.testing.assert_allclose(result[:23], rows, rtol=3e-7, atol=1e-6)
    else:
        expected = normed(rows, norm)
        np.testing.assert_allclose(result[:23], expected, rtol=0, atol=CLOSE)
    if norm is None and places is None and kind != "int4":
        np.testing.assert_array_equal(result[:23], rows.astype(np.float32))


@pytest.mark.parametrize("kind", ["float32", "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("wanted", [(0,), (22,), (4, 0, 4, 21), tuple(range(23))])
def test_head(
    operators: Any, kind: str, tied: bool, centred: bool, wanted: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(len(wanted))
    hidden, vocab = 64, 101
    table, own = a_matrix(vocab, hidden, kind, rng), a_matrix(vocab, hidden, kind, rng)
    norm = a_norm(hidden, centred, rng)
    embedding = packing.embedding(packing.matrix(table), None, None, None, hidden=hidden).block()
    matrix = None if tied else packing.matrix(own)
    head = packing.head(matrix, norm, None, hidden=hidden).block()
    x = np.full((40, hidden), np.nan, np.float32)
    x[:23] = rng.standard_normal((23, hidden), np.float32)
    step = step_words(40, np.zeros(23), np.arange(23), wanted=wanted)
    shape = (len(wanted) + 3, vocab)
    result = operators.call("Head", x, step, BASE, head, embedding, shape=shape)
    assert np.isnan(result[len(wanted) :]).all()
    expected = normed(x[list(wanted)], norm) @ values(table if tied else own).T
    np.testing.assert_allclose(
        result[: len(wanted)], expected, rtol=0, atol=close(kind) * (1 + abs(expected).max())
    )
    for index, row in enumerate(wanted):
        one = step_words(40, np.zeros(23), np.arange(23), wanted=(row,))
        alone = operators.call("Head", x, one, BASE, head, embedding, shape=(1, vocab))
        np.testing.assert_array_equal(alone[0], result[index])
