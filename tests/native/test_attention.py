"""Attention against NumPy in float64."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.native import matrices, packing
from lite_runner.native.model import CACHE
from tests.each import each
from tests.native.conftest import SANITIZED
from tests.native.in_numpy import (
    Floats,
    Wide,
    a_matrix,
    a_norm,
    attention_fields,
    close,
    normed,
    step_words,
    values,
)

LENGTH = 384  # positions of a slot: three chunks of keys
SLOTS = 3
TABLES = np.random.default_rng(5).permutation(9).reshape(SLOTS, 3).astype(np.int32)
CAPACITY = 500
CACHES = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}

Held = NDArray[Any]  # blocks of arrays of the cache by CACHE


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
    centred: bool
    cache: str
    weights: str
    rounded_input: bool = False
    head_norms: tuple[bool, bool] = (False, False)  # of queries, of keys
    window: int | None = None
    out_bias: bool = False
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
        self.out_biases = rng.standard_normal(self.hidden, np.float32) if self.out_bias else None
        self.query_norm, self.key_norm = (
            a_norm(self.dim, False, rng) if there else None for there in self.head_norms
        )
        self.slopes = rng.random(self.heads, np.float32) if self.alibi else None
        angles = np.outer(np.arange(LENGTH), rng.random(self.dim // 2))
        self.rope = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        self.x = rng.standard_normal((SLOTS, LENGTH, self.hidden), np.float32)
        self.block = packing.attention(
            attention_fields(
                self.heads,
                self.kv_heads,
                self.dim,
                self.hidden,
                rotary=self.rotary,
                window=self.window or 0,
            ),
            matrices.matrix(self.inward, self.biases, rounded_input=self.rounded_input),
            matrices.matrix(self.outward, self.out_biases, rounded_input=self.rounded_input),
            self.norm,
            slopes=self.slopes,
            query_norm=self.query_norm,
            key_norm=self.key_norm,
        ).block()

    def fresh_cache(self) -> Held:
        """Blocks of keys, values and their scales, full of what must not matter."""
        heads, dtype = self.kv_heads, CACHES[self.cache]
        scales = (np.float32, (heads, 128 if self.cache == "int8" else 1))
        arrays = [(dtype, (heads, 4, self.dim, 32)), (dtype, (heads, -(-self.dim // 32), 128, 32))]
        filler = 111 if self.cache == "int8" else np.nan
        forms = [(name, *form) for name, form in zip(CACHE, [*arrays, scales, scales], strict=True)]
        found = np.zeros(TABLES.size, forms)
        for name, kind, _ in forms:
            found[name] = np.nan if kind == np.float32 else filler
        return found

    def run(self, operators: Any, cache: Held, slots: list[int], positions: list[int]) -> Floats:
        """One step over some tokens -> [len(slots), hidden]."""
        count = len(slots)
        x = np.full((CAPACITY, self.hidden), np.nan, np.float32)
        x[:count] = self.x[slots, positions]
        step = step_words(CAPACITY, np.array(slots), np.array(positions))
        result = operators.layer(self.block, step, x, cache=cache, tables=TABLES, rope=self.rope)
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

    def expected(self, cache: Held, slot: int, count: int) -> Wide:
        """Outputs of the first tokens of a slot [count, hidden], whose keys and values are in the
        cache: these are checked too, and then taken as they are."""
        positions = np.arange(count)
        fused = normed(self.x[slot, :count], self.norm) @ values(self.inward).T
        fused = fused if self.biases is None else fused + self.biases
        fused = fused.reshape(count, -1, self.dim)
        query, key = fused[:, : self.heads], fused[:, self.heads : -self.kv_heads]
        query = query if self.query_norm is None else normed(query, self.query_norm)
        key = key if self.key_norm is None else normed(key, self.key_norm)
        query, key = self.rotated(query, positions), self.rotated(key, positions)
        mine = cache[TABLES[slot]]
        heads = self.kv_heads
        held = [
            mine["keys"].transpose(1, 0, 2, 4, 3).reshape(heads, LENGTH, self.dim),
            mine["values"].transpose(1, 0, 3, 2, 4).reshape(heads, LENGTH, -1)[..., : self.dim],
        ]
        found = []
        for stored, name, exact in zip(
            held, CACHE[2:], (key, fused[:, -self.kv_heads :]), strict=True
        ):
            wide = stored[:, :count].transpose(1, 0, 2).astype(np.float64)
            if self.cache == "int8":
                scale = mine[name].swapaxes(0, 1).reshape(heads, -1)[:, :count].T[..., None]
                rtol = 5 * close(self.weights)
                np.testing.assert_allclose(scale[..., 0], abs(exact).max(-1) / 127, rtol=rtol)
                wide = wide * scale
                room = 0.5 * scale
            else:
                room = abs(exact) * (2.0**-11 if self.cache == "fp16" else 0)
            assert (abs(wide - exact) <= room * 1.001 + 5 * close(self.weights)).all()
            found.append(wide.repeat(self.group, 1))
        # [heads, tokens, dim], for products of BLAS: einsum takes ten times as long.
        query, keys, mine = (one.swapaxes(0, 1) for one in (query, *found))
        scores = query @ keys.swapaxes(1, 2) / np.sqrt(self.dim)
        if self.slopes is not None:
            distance = positions - positions[:, None]
            scores = scores + self.slopes[:, None, None] * distance
        seen = positions <= positions[:, None]
        if self.window is not None:
            seen &= positions > positions[:, None] - self.window
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = (weights @ mine).swapaxes(0, 1).reshape(count, -1)
        out = mixed @ values(self.outward).T
        out = out if self.out_biases is None else out + self.out_biases
        return out + self.x[slot, :count]


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


def outputs(layer: Layer, operators: Any, steps: Schedule) -> tuple[Floats, Held]:
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
    dim=st.sampled_from([8, 16, 40, 64, 80, 128, 320]),
    rotary=st.booleans(),
    alibi=st.booleans(),
    bias=st.booleans(),
    centred=st.booleans(),
    cache=st.sampled_from(sorted(CACHES)),
    weights=st.sampled_from(["float32", "int8", "int4"]),
    head_norms=st.tuples(st.booleans(), st.booleans()),
    window=st.sampled_from([None, None, None, 1, 5, 31, 100, 128, 129, 200, 383, 1000]),
    out_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
# One slot at least goes over several chunks.
counts = st.tuples(st.integers(1, 10), st.integers(1, 130), st.sampled_from([128, 129, 300, 384]))


def test_attention(operators: Any) -> None:
    @settings(max_examples=settings().max_examples // 2)
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


def test_attention_in_bfloat16(operators: Any) -> None:
    """Of the sizes of its float32 cousin, and as near as 8 bits are."""

    @settings(max_examples=settings().max_examples // 4)
    @given(layer=layers, counts=counts)
    def check(layer: Layer, counts: tuple[int, int, int]) -> None:
        operators.set_threads(2)
        form = {one.name: getattr(layer, one.name) for one in fields(Layer) if one.init}
        short = Layer(**(form | {"weights": "bfloat16", "rounded_input": True}))
        long = Layer(**(form | {"weights": "bfloat16"}))
        steps = schedule(list(counts), np.random.default_rng(layer.seed), 200)
        found, _ = outputs(short, operators, steps)
        expected, _ = outputs(long, operators, steps)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert 0 < error < 0.03, error

    check()


@each(
    ("weights", "window", "cache"),
    [
        # What is multiplied with weights knows nothing of the cache, which holds what comes out.
        *(("float32", window, cache) for window in (None, 130) for cache in sorted(CACHES)),
        *(("int8", None, "int8"), ("int4", None, "fp16"), ("integers", None, "fp32")),
        *(("float32", 3, "int8"), ("int8", 50, "fp16")),
        *(("bfloat16", None, "int8"), ("bfloat16", 77, "fp16")),
    ],
)
def test_attention_is_the_same_however_a_prompt_is_split(
    operators: Any, weights: str, window: int | None, cache: str
) -> None:
    """To the last bit: as single tokens, as one prompt, in parts; with any number of threads."""
    integers = weights == "integers"
    layer = Layer(
        *(64, 2, 3, 40, True, True, True, False),
        cache=cache,
        weights="int8" if integers else weights,
        rounded_input=integers or weights == "bfloat16",
        head_norms=(window is not None,) * 2,
        window=window,
    )
    counts = [5, 1, 140] if SANITIZED else [5, 131, 300]
    every = [(slot, p) for slot, count in enumerate(counts) for p in range(count)]
    operators.set_threads(1)
    rng = np.random.default_rng(0)
    alone = schedule(counts, rng, 20) if SANITIZED else [[one] for one in every]  # slow there
    first, held = outputs(layer, operators, alone)
    assert np.isfinite(first).all() and first[2, counts[2] - 1].any()
    for threads, steps in (
        (2, [every]),
        (5, schedule(counts, rng, 7)),
        (2, schedule(counts, rng, 150)),
    ):
        operators.set_threads(threads)
        found, other = outputs(layer, operators, steps)
        np.testing.assert_array_equal(found, first)
        for name in CACHE:
            assert held[name].tobytes() == other[name].tobytes()


def test_a_step_may_be_empty(operators: Any) -> None:
    layer = Layer(16, 2, 2, 16, True, False, False, False, cache="fp32", weights="float32")
    held = layer.fresh_cache()
    assert layer.run(operators, held, [], []).shape == (0, 16)
    assert np.isnan(held["keys"]).all()


@each("cache", sorted(CACHES))
def test_a_slot_is_used_again(operators: Any, cache: str) -> None:
    """Keys of a longer row that are left in the cache do not matter to the next."""
    layer = Layer(16, 2, 2, 16, True, False, False, False, cache=cache, weights="float32")
    alone, _ = outputs(layer, operators, [[(1, p) for p in range(140)], [(1, 140)]])
    held = layer.fresh_cache()
    layer.x[0] *= 100
    layer.run(operators, held, [0] * LENGTH, list(range(LENGTH)))
    layer.x[0] = layer.x[1]
    again = layer.run(operators, held, [0] * 140, list(range(140)))
    np.testing.assert_array_equal(again, alone[1, :140])
    last = layer.run(operators, held, [0], [140])
    np.testing.assert_array_equal(last[0], alone[1, 140])


@each("cache", sorted(CACHES))
def test_a_token_that_is_no_number_stays_in_its_slot(operators: Any, cache: str) -> None:
    layer = Layer(16, 2, 2, 16, True, False, False, False, cache=cache, weights="float32")
    every = [(slot, p) for slot in range(SLOTS) for p in range(150)]
    before, _ = outputs(layer, operators, [every, [(1, 150)]])
    layer.x[1, 140, 3] = np.nan
    after, _ = outputs(layer, operators, [every, [(1, 150)]])
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
    assert np.isnan(after[1, 140:151]).all()  # all that see it
    np.testing.assert_array_equal(after[1, :90], before[1, :90])


@each("cache", sorted(CACHES))
def test_a_key_that_is_no_number_is_not_passed_over(operators: Any, cache: str) -> None:
    """Such as an overflow of float16 makes: the values alone would be numbers."""
    layer = Layer(16, 1, 2, 16, True, False, False, False, cache=cache, weights="float32")
    filled = layer.fresh_cache()
    layer.run(operators, filled, [0] * 300, list(range(300)))
    for which, together in itertools.product((0, 127, 128, 255, 256, 299), (1, 30)):
        held, block = deepcopy(filled), TABLES[0, which // 128]
        if cache == "int8":
            held["key_scales"][block, 0, which % 128] = np.nan
        else:
            held["keys"][block, 0, which % 128 // 32, :, which % 32] = np.nan
        after = layer.run(operators, held, [0] * together, list(range(300, 300 + together)))
        assert np.isnan(after).all(), (which, together)


@each(("cache", "window"), [*itertools.product(sorted(CACHES), (1, 45, 128, 172))])
def test_keys_before_the_window_are_not_read(operators: Any, cache: str, window: int) -> None:
    """A single token, or the first of some: keys that it does not see may be anything."""
    layer = Layer(
        *(16, 1, 2, 16, True, False, False, False), cache=cache, weights="float32", window=window
    )
    held = layer.fresh_cache()
    layer.run(operators, held, [0] * 300, list(range(300)))

    def behind(together: int) -> Floats:
        return layer.run(
            operators, deepcopy(held), [0] * together, list(range(300, 300 + together))
        )

    before = [behind(together) for together in (1, 30)]
    filler, first = layer.fresh_cache(), 301 - window
    for position in range(first):
        block, place = TABLES[0, position // 128], position % 128
        held["keys"][block, :, place // 32, :, place % 32] = filler["keys"][0, 0, 0, 0, 0]
        held["values"][block, :, :, place] = filler["values"][0, 0, 0, 0, 0]
        if cache == "int8":
            for name in CACHE[2:]:
                held[name][block, :, place] = np.nan
    for together, expected in zip((1, 30), before, strict=True):
        np.testing.assert_array_equal(behind(together), expected)
    if window > 1:  # the first that it sees it does
        block, place = TABLES[0, first // 128], first % 128
        if cache == "int8":
            held["value_scales"][block, 0, place] = np.nan
        else:
            held["values"][block, 0, :, place] = np.nan
        assert all(np.isnan(behind(together)[0]).all() for together in (1, 30))
