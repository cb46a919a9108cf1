"""The ctypes structs match those of the C++: offsets of fields, constants of both sides.

LoRA in the operators: as if each token's adapter had been added to the weights."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from ctypes import Structure, c_double, sizeof
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.native import matrices, packing, structs
from lite_runner.native.model import CACHE
from lite_runner.native.structs import NormValues, PoolLayout, Target
from tests.each import each
from tests.native.in_numpy import attention_fields, feed_forward_fields

SOURCES = Path(native.__file__).parent / "src"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")))
STRUCTS = [one for one in Structure.__subclasses__() if one.__module__ == structs.__name__]
# Names that differ by more than their style; `in` is a keyword of Python's.
GGUF_TYPE = re.compile(r"I?Q\d_\w+")  # named as there, in both
OTHER_NAMES = {"inputs": "in", "BFLOAT16": "kBFloat16"}


def expressions() -> dict[str, int]:
    """C++ expressions, and the values that they have in Python."""
    found = {
        "kPanel": structs.PANEL,
        "kInputGroup": structs.INPUT_GROUP,
        "kMostDim": structs.MOST_HEAD_DIM,
    }
    for struct in STRUCTS:
        name = struct.__name__
        found[f"sizeof({name})"] = sizeof(struct)
        for field, kind in struct._fields_:
            there = OTHER_NAMES.get(field, field)
            found[f"offsetof({name}, {there})"] = getattr(struct, field).offset
            found[f"sizeof({name}::{there})"] = sizeof(kind)
            found[f"std::is_floating_point_v<decltype({name}::{there})>"] = kind is c_double
    for enum in (structs.Format, structs.Order, structs.Kind):
        for member in enum:
            styled = member.name.title().replace("_", "")
            if GGUF_TYPE.fullmatch(member.name):
                styled = member.name
            there = OTHER_NAMES.get(member.name, f"k{styled}")
            found[f"{enum.__name__}::{there}"] = member.value
    return found


def test_structs_are_those_of_the_operators(tmp_path: Path) -> None:
    expected = expressions()
    assert {"sizeof(AttentionLayer)", "offsetof(HeadLayer, adapters)"} <= set(expected)
    source = tmp_path / "sizes.cc"
    lines = (f'  std::printf("%lld\\n", (long long)({one}));\n' for one in expected)
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <type_traits>\n"
        '#include "instruction_set.h"\n#include "layers.h"\nusing namespace lite_runner;\n'
        f"int main() {{\n{''.join(lines)}}}\n"
    )
    program = tmp_path / "sizes"
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", f"-I{SOURCES}", source, "-o", program]
    subprocess.run(command, check=True)
    stdout = subprocess.run([program], check=True, capture_output=True, encoding="utf-8").stdout
    assert dict(zip(expected, map(int, stdout.split()), strict=True)) == expected


@each("struct", STRUCTS)
def test_a_field_that_is_not_there_cannot_be_set(struct: type[Structure]) -> None:
    with pytest.raises(AttributeError):
        struct().no_field = 1
    with pytest.raises(AttributeError):
        struct(no_field=1)


def test_units_of_ggufs_blocks_are_panels_of_its_own_sizes() -> None:
    """A panel's rows one beside the other, and no more than four bytes a row to align them."""
    for form, (inputs, size) in structs.UNITS.items():
        block, stored = GGML_QUANT_SIZES[GGMLQuantizationType[form.name]]
        each, rest = divmod(size, structs.PANEL)
        assert (inputs, rest) == (block, 0) and stored <= each <= stored + 4, form


RANK = 5
PLACES = 3
COUNT = 21  # tokens of a step, each in a slot of its own
CAPACITY = 30
HIDDEN, WIDE, VOCAB = 40, 72, 101

Floats = NDArray[np.float32]
Layer = Callable[[list[Floats], PoolLayout | None], NDArray[np.uint8]]
Call = Callable[..., Floats]

RNG = np.random.default_rng(0)
PLACE = RNG.integers(-1, PLACES, CAPACITY).astype(np.int32)
PLACE[:3] = -1, 0, 2
PLACE[8:15] = 1
X = RNG.standard_normal((CAPACITY, HIDDEN), np.float32)
NORM = NormValues(RNG.standard_normal(HIDDEN, np.float32), None, 1e-5)


def numbers(*shape: int) -> Floats:
    return RNG.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))


def step(position: int = 0, wanted: tuple[int, ...] = ()) -> NDArray[np.int32]:
    rows = np.zeros((4, CAPACITY), np.int32)
    rows[0], rows[1] = np.arange(CAPACITY) * 7 % VOCAB, np.arange(CAPACITY)
    rows[2:] = position
    return np.concatenate([[COUNT, len(wanted)], rows.reshape(-1), wanted]).astype(np.int32)


def check(
    weights: list[Floats], changed: tuple[bool, ...], looked_up: bool, layer: Layer, call: Call
) -> None:
    """`call(block, pool...)` gives [rows, n] for tokens `call.__defaults__`; `changed`: which of
    the matrices the adapters change."""
    targets = tuple(
        Target(str(index), *weight.shape[:: 1 if looked_up else -1], looked_up) if wish else None
        for index, (weight, wish) in enumerate(zip(weights, changed, strict=True))
    )
    layout = PoolLayout(RANK, targets)
    pool = RNG.standard_normal((PLACES, layout.width), np.float32) * np.float32(0.3)
    base = call(layer(weights, None))
    block = layer(weights, layout)
    found = call(block, pool)
    np.testing.assert_array_equal(found[PLACE[:COUNT] < 0], base[PLACE[:COUNT] < 0])
    halves = (pool.view(np.uint32) >> 16).astype(np.uint16)
    cut = (halves.astype(np.uint32) << 16).view(np.float32)
    cut_found = call(block, cut)
    assert abs(cut_found - found).max() > 1e-3
    np.testing.assert_allclose(call(block, halves), cut_found, rtol=0, atol=1e-5)
    for place in range(PLACES):
        merged, at = [], 0
        for weight, target in zip(weights, targets, strict=True):
            wide = weight.astype(np.float64)
            if target is not None:
                a = pool[place, at : at + RANK * target.inputs].astype(np.float64)
                at += a.size
                b = pool[place, at : at + RANK * target.padded_outputs].reshape(-1, RANK, 32)
                at += b.size
                b = b.swapaxes(0, 1).reshape(RANK, -1)[:, : target.outputs]
                wide += a.reshape(-1, RANK) @ b if looked_up else (a.reshape(RANK, -1).T @ b).T
            merged.append(wide.astype(np.float32))
        expected = call(layer(merged, None))
        mine = PLACE[:COUNT] == place
        assert mine.any() and (abs(expected[mine] - base[mine]) > 1e-2).any()
        np.testing.assert_allclose(
            found[mine], expected[mine], rtol=0, atol=1e-5 * (1 + abs(expected).max())
        )


@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("changed", [(True,) * 4, (False, True, False, True), (True, *[False] * 3)])
def test_attention(operators: Any, changed: tuple[bool, ...], head_norms: bool) -> None:
    heads, kv_heads, dim = 4, 2, 20  # neither queries nor keys end with a panel
    outs = (heads * dim, kv_heads * dim, kv_heads * dim)
    weights = [*(numbers(out, HIDDEN) for out in outs), numbers(HIDDEN, heads * dim)]
    rope = np.ones((2, dim), np.float32)
    norms = [NormValues(RNG.random(dim, np.float32), None, 1e-5) for _ in range(2)]
    query_norm, key_norm = norms if head_norms else (None, None)

    def layer(weights: list[Floats], layout: PoolLayout | None) -> NDArray[np.uint8]:
        inward, outward = np.concatenate(weights[:3]), weights[3]
        return packing.attention(
            attention_fields(heads, kv_heads, dim, HIDDEN, rotary=True),
            matrices.matrix(inward),
            matrices.matrix(outward),
            NORM,
            layout,
            query_norm=query_norm,
            key_norm=key_norm,
        ).block()

    def call(block: NDArray[np.uint8], *pool: NDArray[Any]) -> Floats:
        shapes = [(kv_heads, 4, dim, 32), (kv_heads, 1, 128, 32), (1,), (1,)]
        forms = [(name, np.float32, one) for name, one in zip(CACHE, shapes, strict=True)]
        cache = np.zeros(CAPACITY, forms)
        tables = np.arange(CAPACITY, dtype=np.int32)[:, np.newaxis]  # a block for each slot
        for position in (0, 1):
            x = X[:: 1 - 2 * position].copy()
            found: Floats = operators.layer(
                block, step(position), x, *pool, cache=cache, tables=tables, rope=rope, places=PLACE
            )
        return found[:COUNT]

    check(weights, changed, False, layer, call)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "changed", [(True, True, True), (False, True, False), (False, False, True)]
)
def test_feed_forward(operators: Any, gated: bool, changed: tuple[bool, ...]) -> None:
    weights = [numbers(WIDE, HIDDEN), numbers(WIDE, HIDDEN), numbers(HIDDEN, WIDE)]

    def layer(weights: list[Floats], layout: PoolLayout | None) -> NDArray[np.uint8]:
        up = matrices.Alternating(weights[0], weights[1]) if gated else weights[1]
        return packing.feed_forward(
            feed_forward_fields(HIDDEN, WIDE, gated),
            matrices.matrix(up),
            matrices.matrix(weights[2]),
            NORM,
            layout,
        ).block()

    def call(block: NDArray[np.uint8], *pool: NDArray[Any]) -> Floats:
        found: Floats = operators.layer(block, step(), X, *pool, places=PLACE)
        return found[:COUNT]

    check(weights, (changed[0] and gated, *changed[1:]), False, layer, call)


def test_head(operators: Any) -> None:
    wanted = tuple(range(COUNT))

    def layer(weights: list[Floats], layout: PoolLayout | None) -> NDArray[np.uint8]:
        return packing.head(matrices.matrix(weights[0]), NORM, layout, hidden=HIDDEN).block()

    def call(block: NDArray[np.uint8], *pool: NDArray[Any]) -> Floats:
        def logits(*wanted: int) -> Floats:
            found: Floats = operators.head(
                block, step(wanted=wanted), X, VOCAB, *pool, places=PLACE
            )
            return found

        found = logits(*wanted)
        # The rows that are wanted have the adapters of their tokens, in whatever order.
        np.testing.assert_array_equal(logits(*wanted[::-1])[::-1], found)
        for row in wanted:  # alone, and beside rows of the same adapter
            np.testing.assert_array_equal(logits(row)[0], found[row])
        return found

    check([numbers(VOCAB, HIDDEN)], (True,), False, layer, call)


def test_embedding(operators: Any) -> None:
    def layer(weights: list[Floats], layout: PoolLayout | None) -> NDArray[np.uint8]:
        table = matrices.matrix(weights[0])
        return packing.embedding(table, None, None, layout, hidden=HIDDEN).block()

    def call(block: NDArray[np.uint8], *pool: NDArray[Any]) -> Floats:
        found: Floats = operators.embedding(block, step(), X.shape, *pool, places=PLACE)
        return found[:COUNT]

    check([numbers(VOCAB, HIDDEN)], (True,), True, layer, call)
