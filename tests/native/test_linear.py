"""Products of rows with packed matrices, against NumPy in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.native import matrices, packing, structs
from lite_runner.weights import DType, narrowed, widened
from lite_runner.weights.quantization.quantized import QuantizedTensor, packed, quantize
from tests.each import each
from tests.native.conftest import Operators
from tests.native.in_numpy import Floats, rounded, step_words, with_outliers
from tests.packed_folders import E4M3, bfloat16

STORED: dict[str, DType] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
UNIT = 2.0**-24  # the largest relative error of one float32 operation
FORMATS = (
    *("float32", "bfloat16", "float16", "int8", "int8 in groups", "int4 in groups"),
    *("float8", "float8 in groups", "int4 from 8", "int4 in groups from zeros"),
    *("int8 in groups from zeros", "int4 in groups, ordered", "table in groups"),
)


@dataclass
class Matrix:
    """A packed matrix, and its values."""

    weight: matrices.Weight
    values: NDArray[np.float64]  # [out, in], inputs in the order of the columns
    parts: NDArray[np.float64]  # [out, in]: what the sum of a value's parts could be at most
    group: int


def random_matrix(kind: str, out: int, inputs: int, group: int, rng: np.random.Generator) -> Matrix:
    if kind in STORED:
        weight = narrowed(rng.standard_normal((out, inputs), np.float32), STORED[kind])
        wide = widened(weight).astype(np.float64)
        return Matrix(weight, wide, abs(wide), 0)
    if kind == "int8":
        integers = rng.integers(-127, 128, (out, inputs)).astype(np.int8)
        scales = rng.random(out, np.float32) + np.float32(0.01)
        wide = integers * scales[:, None].astype(np.float64)
        return Matrix(QuantizedTensor(8, 0, integers, scales, None), wide, abs(wide), 0)
    if kind == "int4 from 8":  # the same for all
        nibbles = rng.integers(0, 16, (out, inputs)).astype(np.uint8)
        scales = rng.random(out, np.float32) + np.float32(0.01)
        wide = (nibbles - 8.0) * scales[:, None].astype(np.float64)
        tensor = QuantizedTensor(4, 0, packed(nibbles), scales, None, zero=8)
        return Matrix(tensor, wide, (nibbles + 8.0) * scales[:, None], 0)
    if kind.startswith("float8"):
        codes = rng.integers(0, 0x7F, (out, inputs)) | rng.integers(0, 2, (out, inputs)) << 7
        scales = rng.random((out, inputs // group if group else 1), np.float32)
        wide = E4M3[codes].astype(np.float64) * scales.repeat(group or inputs, 1)
        stored = scales if group else scales[:, 0]
        tensor = QuantizedTensor(8, group, codes.astype(np.uint8), stored, None, codes="e4m3")
        return Matrix(tensor, wide, abs(wide), group)
    groups = (out, inputs // group)
    if kind == "table in groups":
        indices, table = rng.integers(0, 16, (out, inputs)), rng.standard_normal(16, np.float32)
        scales = rng.random(groups, np.float32)
        wide = table[indices].astype(np.float64) * scales.repeat(group, 1)
        tensor = QuantizedTensor(
            4, group, packed(indices.astype(np.uint8)), scales, None, table=table
        )
        return Matrix(tensor, wide, abs(wide), group)
    if "zeros" in kind or "ordered" in kind:
        four = kind.startswith("int4")
        integers = rng.integers(0 if four else -128, 16 if four else 128, (out, inputs))
        zeros = rng.integers(0 if four else -128, 16 if four else 128, groups)
        scales, each = bfloat16(rng.random(groups) + 0.01)
        tensor = QuantizedTensor(
            bits=4 if four else 8,
            group=group,
            values=packed(integers.astype(np.uint8)) if four else integers.astype(np.int8),
            scales=scales,
            minimums=None,
            zeros=zeros.astype(np.int8),
            order=rng.permutation(inputs).astype(np.int32) if "ordered" in kind else None,
        )
        each, apart = each.astype(np.float64).repeat(group, 1), zeros.repeat(group, 1)
        return Matrix(tensor, (integers - apart) * each, (abs(integers) + abs(apart)) * each, group)
    scales = (rng.random(groups) + 0.01).astype(np.float16)
    each = scales.astype(np.float64).repeat(group, 1)
    if kind == "int8 in groups":
        integers = rng.integers(-127, 128, (out, inputs)).astype(np.int8)
        tensor = QuantizedTensor(8, group, integers, scales, None)
        return Matrix(tensor, integers * each, abs(integers * each), group)
    nibbles = rng.integers(0, 16, (out, inputs)).astype(np.uint8)
    minimums = -rng.random(groups).astype(np.float16) * np.float16(8)
    tensor = QuantizedTensor(4, group, nibbles[:, ::2] | nibbles[:, 1::2] << 4, scales, minimums)
    low = minimums.astype(np.float64).repeat(group, 1)
    return Matrix(tensor, nibbles * each + low, nibbles * each + abs(low), group)


@st.composite
def shapes(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    group = draw(st.sampled_from([32, 64, 128])) if "groups" in kind else 0
    inputs = group * draw(st.integers(1, 5)) if group else draw(st.integers(1, 600))
    if kind == "int4 from 8":
        inputs = -(-inputs // 8) * 8
    return {
        "out": draw(st.integers(1, 100)),
        "inputs": inputs,
        "group": group,
        "rows": draw(st.one_of(st.integers(1, 5), st.integers(1, 70))),
        "bias": draw(st.booleans()),
        "threads": draw(st.sampled_from([1, 2, 5])),
        "offset": draw(st.integers(0, 15)),
        "seed": draw(st.integers(0, 1000)),
    }


def unaligned(x: NDArray[np.float32], offset: int) -> NDArray[np.float32]:
    """A copy that begins so many floats behind where memory was given."""
    moved = np.empty(x.size + offset, np.float32)[offset:].reshape(x.shape)
    moved[:] = x
    return moved


@each("kind", FORMATS)
def test_products(operators: Any, kind: str) -> None:
    @given(shape=shapes(kind))
    def check(shape: dict[str, Any]) -> None:
        rng = np.random.default_rng(shape["seed"])
        matrix = random_matrix(kind, shape["out"], shape["inputs"], shape["group"], rng)
        x = unaligned(
            rng.standard_normal((shape["rows"], shape["inputs"]), np.float32), shape["offset"]
        )
        bias = rng.standard_normal(shape["out"], np.float32) if shape["bias"] else None
        block = matrices.matrix(matrix.weight, bias).block()
        operators.set_threads(shape["threads"])
        result, given = operators.linear(block, shape["out"], x), x
        wide, weight = x.astype(np.float64), matrix.weight
        floats = isinstance(weight, QuantizedTensor) and (
            weight.codes != "integers" or weight.table is not None
        )
        if isinstance(weight, QuantizedTensor) and not floats:
            # Multiplied by 16 bits.
            x = x if weight.order is None else np.ascontiguousarray(x[:, weight.order])
            integers, scales = rounded(x, shape["group"] or 4 * structs.INPUT_GROUP, 32512)
            wide = (integers * scales[..., None].astype(np.float64)).reshape(len(x), -1)
            wide = wide[:, : shape["inputs"]]
            assert (abs(wide - x) <= abs(x).max(1, keepdims=True) / 64000).all()
        exact = wide @ matrix.values.T
        magnitude = abs(wide) @ matrix.parts.T
        if bias is not None:
            exact += bias
            magnitude += abs(bias)
        # Every number takes part in at most as many additions as there are inputs, and a few
        # products: the bound that holds for any order of summation.
        assert (abs(result - exact) <= (shape["inputs"] + 8) * UNIT * magnitude).all()
        # A row is the same alone, and with any number of threads.
        operators.set_threads(1)
        rows = [given[i : i + 1] for i in range(len(given))]
        alone = [operators.linear(block, shape["out"], row)[0] for row in rows]
        np.testing.assert_array_equal(np.array(alone), result)

    check()


@each("kind", FORMATS[6:])
def test_rows_of_a_table_of_tokens(operators: Any, kind: str) -> None:
    weight = random_matrix(kind, 70, 64, 32, np.random.default_rng(5)).weight
    assert isinstance(weight, QuantizedTensor)
    table = matrices.matrix(weight)
    block = packing.embedding(table, None, None, None, hidden=64).block()
    tokens = np.array([3, 69, 0, 31, 32])
    words = step_words(5, np.zeros(5), np.arange(5), tokens)
    found = operators.embedding(block, words, (5, 64))
    np.testing.assert_allclose(found, weight.float32()[tokens], rtol=3e-7)


@each("kind", ["int8", "int8 in groups"])
def test_products_of_integers(operators: Any, kind: str) -> None:
    """Inputs are rounded to int8 too, but near outliers; sums of products of integers are exact."""

    @given(shape=shapes(kind))
    def check(shape: dict[str, Any]) -> None:
        rng = np.random.default_rng(shape["seed"])
        matrix = random_matrix(kind, shape["out"], shape["inputs"], shape["group"], rng)
        assert isinstance(matrix.weight, QuantizedTensor)
        x = rng.standard_normal((shape["rows"], shape["inputs"]), np.float32)
        x = unaligned(with_outliers(x, rng), shape["offset"])
        bias = rng.standard_normal(shape["out"], np.float32) if shape["bias"] else None
        block = matrices.matrix(matrix.weight, bias, rounded_input=True).block()
        operators.set_threads(shape["threads"])
        result = operators.linear(block, shape["out"], x)

        group = shape["group"] or structs.INPUT_GROUP
        integers, x_scales = rounded(x, group, 32512, eight=True)
        missing = -shape["inputs"] % group
        weights = np.pad(matrix.weight.values, ((0, 0), (0, missing))).astype(np.int64)
        weights = weights.reshape(shape["out"], -1, group)
        sums = np.einsum("rgk,ogk->rog", integers, weights)
        scales = matrix.weight.scales.astype(np.float32).reshape(shape["out"], -1)
        terms = sums.astype(np.float64) * x_scales[:, None] * scales
        exact, magnitude = terms.sum(2), abs(terms).sum(2)
        if bias is not None:
            exact, magnitude = exact + bias, magnitude + abs(bias)
        # A sum is made a float, scaled twice, and added up once a group.
        assert (abs(result - exact) <= (sums.shape[2] + 6) * UNIT * magnitude).all()
        if sums.shape[2] == 1 and bias is None:
            floats = sums[..., 0].astype(np.float32)
            grouped, whole = floats * (x_scales * scales.T), floats * x_scales * scales.T
            np.testing.assert_array_equal(result, grouped if shape["group"] else whole)

    check()


@each("kind", FORMATS)
def test_nan_reaches_its_own_row_alone(operators: Any, kind: str) -> None:
    rng = np.random.default_rng(0)
    shapes = ((160, 32), (128, 64))
    for rows, rounded_input, (inputs, group) in itertools.product(
        (1, 4, 20), (False, True), shapes
    ):
        case = f"{rows} rows of {inputs} inputs, rounded_input={rounded_input}"
        matrix = random_matrix(kind, 40, inputs, group, rng)
        block = matrices.matrix(matrix.weight, rounded_input=rounded_input).block()
        x = rng.standard_normal((rows, inputs), np.float32)
        before = operators.linear(block, 40, x)
        assert np.isfinite(before).all(), case
        others = np.arange(rows) != rows // 2
        for column in (0, 7, 17, inputs - 1):
            for value in (np.nan, np.inf, -np.inf):
                changed = x.copy()
                changed[rows // 2, column] = value
                result = operators.linear(block, 40, changed)
                np.testing.assert_array_equal(result[others], before[others], case)
                assert not np.isfinite(result[rows // 2]).any(), case
                if np.isnan(value):
                    assert np.isnan(result[rows // 2]).all(), case


@pytest.mark.parametrize("rounded_input", [False, True])
def test_integers_of_extreme_inputs(operators: Any, rounded_input: bool) -> None:
    """Zeros, numbers whose scale has no inverse, and the largest sums that there are."""
    inputs = 4096
    weight = QuantizedTensor(
        8, 0, np.full((32, inputs), -127, np.int8), np.ones(32, np.float32), None
    )
    block = matrices.matrix(weight, rounded_input=rounded_input).block()
    numbers = ((0, 0), (1e-40, 0), (3.0, -381.0 * inputs), (-3e38, np.inf))
    for rows, (number, expected) in itertools.product((1, 3), numbers):
        x = np.full((rows, inputs), number, np.float32)
        result = operators.linear(block, 32, x)
        np.testing.assert_allclose(result, np.full_like(result, expected), rtol=1e-6)


def test_the_largest_sums_of_4_bits(operators: Any) -> None:
    """Groups as long as they may be, of the largest integers on both sides."""
    group = structs.MOST_GROUP
    ones = np.ones((40, 2), np.float16)
    full = np.full((40, group), 0xFF, np.uint8)
    block = matrices.matrix(QuantizedTensor(4, group, full, ones, 0 * ones)).block()
    for sign in (1, -1):
        x = np.full((3, 2 * group), sign, np.float32)
        result = operators.linear(block, 40, x)
        np.testing.assert_allclose(result, np.full_like(result, sign * 30 * group), rtol=1e-6)


def test_integers_of_8_bits_alone_take_integers(operators: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 64), np.float32)
    for kind in ("float32", "float16", "int4 in groups"):
        weight = random_matrix(kind, 33, 64, 32, rng).weight
        plain, integer = (
            matrices.matrix(weight, rounded_input=wish).block() for wish in (False, True)
        )
        np.testing.assert_array_equal(
            operators.linear(plain, 33, x), operators.linear(integer, 33, x)
        )


@pytest.mark.parametrize("rows", [1, 9])
def test_threads_have_runs_of_a_large_matrix(operators: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight = rng.standard_normal((rows, 300), np.float32), rng.standard_normal((3001, 300))
    block = matrices.matrix(weight.astype(np.float32)).block()
    operators.set_threads(1)
    alone = operators.linear(block, 3001, x)
    np.testing.assert_allclose(alone, x @ weight.T, rtol=0, atol=1e-4)
    for threads in (2, 3, 5, 16):
        operators.set_threads(threads)
        np.testing.assert_array_equal(operators.linear(block, 3001, x), alone)


def test_numbers_of_16_bits_are_kept_in_16_bits(operators: Any) -> None:
    """Every one of them, the smallest too, comes out as it went in."""
    x = np.eye(256, dtype=np.float32)
    for kind, dtype in ("float16", np.float16), ("bfloat16", np.uint16):
        every = np.arange(1 << 16, dtype=np.uint16).view(dtype).reshape(256, 256)
        finite = np.where(np.isfinite(widened(every)), every, dtype(0))
        block = matrices.matrix(finite).block()
        assert 2 * finite.size <= block.nbytes < 2 * finite.size + 256, kind
        np.testing.assert_array_equal(operators.linear(block, 256, x), widened(finite).T)


def test_floats_that_bfloat16_holds_are_packed_as_such(operators: Any) -> None:
    stored = random_matrix("bfloat16", 70, 40, 0, np.random.default_rng(3)).weight
    assert isinstance(stored, np.ndarray)
    block = matrices.matrix(widened(stored)).block()
    np.testing.assert_array_equal(block, matrices.matrix(stored).block())


@each(("rows", "inputs"), [(1, 7), (1, 600), (3, 40), (13, 300), (40, 777)])
def test_inputs_in_bfloat16(operators: Operators, rows: int, inputs: int) -> None:
    """The bits that the processor's own instruction gives, whether it is there or not; those of
    AMX's tiles have an order of their own."""
    rng = np.random.default_rng(rows)
    stored = random_matrix("bfloat16", 45, inputs, 0, rng).weight
    assert isinstance(stored, np.ndarray)
    x = rng.standard_normal((rows, inputs), np.float32) * np.float32(37)
    block = matrices.matrix(stored, rounded_input=True).block()
    expected = summed_in_bfloat16(x, widened(stored), tiles=operators.chosen() == "amx")
    np.testing.assert_array_equal(operators.linear(block, 45, x), expected)


def summed_in_bfloat16(x: Floats, weights: Floats, *, tiles: bool) -> Floats:
    """x [rows, inputs] in bfloat16 times weights [out, inputs], whose products are exact and whose
    sums are rounded one by one: of each two inputs the second one first. `tiles`: of each 32 those
    at even places and those at odd ones for themselves, then the sum of both."""
    each = 32 if tiles else 2
    rest = ((0, 0), (0, -x.shape[1] % each))
    x, weights = np.pad(widened(narrowed(x, "BF16")), rest), np.pad(weights, rest)
    sums = np.zeros((len(x), len(weights)), np.float32)
    for first in range(0, x.shape[1], each):
        products = [x[:, k : k + 1] * weights[:, k] for k in range(first, first + each)]
        if tiles:
            even, odd = (np.add.accumulate(products[place::2])[-1] for place in (0, 1))
            sums += even + odd
        else:
            sums += products[1]
            sums += products[0]
    return sums


def test_inputs_that_bfloat16_cannot_hold(operators: Any) -> None:
    block = matrices.matrix(
        narrowed(np.eye(8, dtype=np.float32), "BF16"), rounded_input=True
    ).block()
    largest = np.finfo(np.float32).max  # the nearest bfloat16 is infinite
    x = np.zeros((4, 8), np.float32)
    x[0, 0], x[1, 0], x[2, 0] = np.nan, np.inf, largest
    x[3, 0] = np.uint32(0x7FFFFFFF).view(np.float32)  # no number, with all bits set
    found = operators.linear(block, 8, x)
    assert np.isnan(found[0, 0]) and np.isnan(found[3, 0])
    assert found[1, 0] == found[2, 0] == np.inf


def test_matrices_of_several_types_are_packed_together(operators: Any) -> None:
    rng = np.random.default_rng(4)
    weights = [random_matrix(kind, 40, 64, 0, rng) for kind in ("float16", "bfloat16", "float32")]
    x = rng.standard_normal((5, 64), np.float32)
    block = matrices.matrix(matrices.stacked([one.weight for one in weights])).block()
    exact = x @ np.concatenate([one.values for one in weights]).T
    np.testing.assert_allclose(operators.linear(block, 120, x), exact, rtol=0, atol=1e-4)


@each(("bits", "group"), [(8, 32), (8, 64), (4, 32), (4, 128)])
def test_packed_integers_equal_their_floats(operators: Any, bits: int, group: int) -> None:
    rng = np.random.default_rng(bits)
    weights = [quantize(rng.standard_normal((70, 256), np.float32), bits, group) for _ in range(2)]
    floats = [weight.float32() for weight in weights]
    widened = matrices.matrix(weights[0], dequantize=True).block()
    np.testing.assert_array_equal(widened, matrices.matrix(floats[0]).block())
    widened = matrices.matrix(matrices.Alternating(*weights), dequantize=True).block()
    np.testing.assert_array_equal(widened, matrices.matrix(matrices.Alternating(*floats)).block())
