"""GGUF's blocks as they are: values as the gguf library has them, products against float64."""

from __future__ import annotations

import itertools
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.native import matrices, packing, structs
from lite_runner.native.structs import UNITS, Format
from lite_runner.weights.formats.gguf_blocks import INDEXED, BlockMatrix
from lite_runner.weights.formats.gguf_file import QUANTIZED_TYPES
from lite_runner.weights.quantization.quantized import E2M1, QuantizedTensor, powers_of_two
from tests.native import in_numpy
from tests.native.in_numpy import step_words, with_outliers

# Others are indices of numbers.
KINDS = [kind for kind in QUANTIZED_TYPES if kind not in ("MXFP4", *INDEXED)]
HALVES = {
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)},
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
}
UNIT = 2.0**-24
FEWER_BITS = {"Q6_K": 16383, "IQ4_XS": 16383}  # else 32512


def random_matrix(kind: str, rows: int, inputs: int, rng: np.random.Generator) -> BlockMatrix:
    """Any bytes, with scales of any sign that are finite."""
    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows * inputs // size, nbytes), np.uint8)
    for at in HALVES.get(kind, (0,)):
        halves = rng.standard_normal(len(data)).astype(np.float16) / np.float16(64)
        data[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return BlockMatrix(kind, data.reshape(rows, -1), inputs)


def theirs(matrix: BlockMatrix) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType[matrix.type_name]
    return np.asarray(gguf.quants.dequantize(matrix.data, kind), np.float32).reshape(matrix.shape)


def rounded(x: NDArray[np.float32], kind: str, *, eight: bool = False) -> NDArray[np.float64]:
    """x [rows, inputs] as the operators round it; `eight`: of rounded_input."""
    most = FEWER_BITS.get(kind, 32512)
    integers, scales = in_numpy.rounded(x, structs.INPUT_GROUP, most, eight=eight)
    whole = integers * scales[..., None].astype(np.float64)
    return whole.reshape(len(x), -1)[:, : x.shape[1]]


def test_values_are_the_librarys_to_the_bit(operators: Any) -> None:
    rng = np.random.default_rng(0)
    for kind, (rows, inputs) in itertools.product(KINDS, ((33, 512), (64, 256))):
        matrix = random_matrix(kind, rows, inputs, rng)
        table = matrices.matrix(matrix)
        block = packing.embedding(table, None, None, None, hidden=inputs).block()
        step = step_words(rows, np.zeros(rows), np.zeros(rows), np.arange(rows))
        found = operators.embedding(block, step, (rows, inputs))
        assert found.tobytes() == theirs(matrix).tobytes(), kind


def test_memory_is_that_of_the_file() -> None:
    for kind in KINDS:
        matrix = random_matrix(kind, 320, 1024, np.random.default_rng(1))
        nbytes = matrices.matrix(matrix).block().nbytes
        assert matrix.nbytes <= nbytes < 1.05 * matrix.nbytes + 256, kind


@pytest.mark.parametrize("kind", KINDS)
def test_products(operators: Any, kind: str) -> None:
    size = UNITS[Format[kind]][0]

    @given(
        rows=st.one_of(st.integers(1, 5), st.integers(1, 40)),
        out=st.integers(1, 100),
        units=st.integers(1, 5 if size == 256 else 20),
        seed=st.integers(0, 1000),
        bias=st.booleans(),
        eight=st.booleans(),
    )
    def check(rows: int, out: int, units: int, seed: int, bias: bool, eight: bool) -> None:
        rng, inputs = np.random.default_rng(seed), size * units
        matrix = random_matrix(kind, out, inputs, rng)
        x = with_outliers(rng.standard_normal((rows, inputs), np.float32), rng)
        offset = rng.standard_normal(out, np.float32) if bias else None
        block = matrices.matrix(matrix, offset, rounded_input=eight).block()
        operators.set_threads(2)
        result = operators.linear(block, out, x)
        values, wide = theirs(matrix).astype(np.float64), rounded(x, kind, eight=eight)
        exact = wide @ values.T + (0 if offset is None else offset)
        # Of parts that a minimum may cancel: at most what integers, scales and minimums are.
        magnitude = abs(wide).sum(1)[:, None] * abs(values).max(1) * 4 + 1
        assert (abs(result - exact) <= (inputs + 8) * UNIT * magnitude).all()
        operators.set_threads(1)
        alone = [operators.linear(block, out, x[i : i + 1])[0] for i in range(rows)]
        np.testing.assert_array_equal(np.array(alone), result)

    check()


@pytest.mark.parametrize("group", sorted({group for _, group, _ in INDEXED.values()}))
def test_products_with_indices(operators: Any, group: int) -> None:
    rng = np.random.default_rng(group)
    values = rng.integers(0, 256, (40, 256), np.uint8)
    scales = rng.standard_normal((40, 512 // group), np.float32)
    exponents = rng.integers(1, 40, scales.shape, np.uint8)
    tables = {
        "floats": (np.linspace(-43, 43, 16, dtype=np.float32), scales),
        "integers": (np.arange(-60, 68, 8, dtype=np.float32), scales),
        "halves": (np.arange(-8, 8, dtype=np.float32) / 2, scales.astype(np.float16)),
        "eighths": (np.arange(-8, 8, dtype=np.float32) * np.float32(1.125), scales),
        "MXFP4": (E2M1, powers_of_two(exponents + np.uint8(100))),
    }
    x = rng.standard_normal((11, 512), np.float32)
    for name, (table, factors) in tables.items():
        matrix = QuantizedTensor(4, group, values, factors, None, table=table)
        exact = x.astype(np.float64) @ matrix.float32().T
        block = matrices.matrix(matrix).block()
        found = operators.linear(block, 40, x)
        assert abs(found - exact).max() <= 1e-4 * abs(exact).max(), name
        few = [operators.linear(block, 40, x[row : row + 3]) for row in range(0, 11, 3)]
        np.testing.assert_array_equal(np.concatenate(few), found, name)


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_matrices_of_several_types_are_one(operators: Any, rows: int, by_turns: bool) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 512), np.float32)
    floats = rng.standard_normal((70, 512), np.float32)
    if by_turns:
        pair = [random_matrix(kind, 70, 512, rng) for kind in ("Q4_K", "Q5_0")]
        block = matrices.matrix(matrices.Alternating(*pair)).block()
        found = operators.linear(block, 192, x).reshape(rows, 3, 2, 32)
        for index, one in enumerate(pair):
            own = operators.linear(matrices.matrix(one).block(), 70, x)
            np.testing.assert_array_equal(found[:, :, index].reshape(rows, -1)[:, :70], own)
        return
    parts = [random_matrix("Q4_K", 64, 512, rng), random_matrix("Q5_K", 32, 512, rng), floats]
    bias = rng.standard_normal(166, np.float32)
    joined = matrices.stacked(parts)
    assert isinstance(joined, matrices.Stacked)
    found = operators.linear(matrices.matrix(joined, bias).block(), 166, x)
    own = [operators.linear(matrices.matrix(one).block(), one.shape[0], x) for one in parts]
    np.testing.assert_array_equal(found, np.concatenate(own, 1) + bias)
    widened = matrices.matrix(joined, bias, dequantize=True).block()
    expected = np.concatenate([theirs(parts[0]), theirs(parts[1]), floats])
    np.testing.assert_array_equal(widened, matrices.matrix(expected, bias).block())


@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_are_rounded_for_the_part_with_the_largest_scales(operators: Any, rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = np.repeat(np.float32([1, -1] * 256)[None], rows, 0)  # rounded to the most there is
    parts = [random_matrix(kind, 32, 512, rng) for kind in ("Q4_K", "Q6_K", "Q8_0")]
    joined = matrices.matrix(matrices.stacked(parts)).block()
    exact = rounded(x, "Q6_K") @ np.concatenate([theirs(one) for one in parts]).T
    found = operators.linear(joined, 96, x)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * abs(exact).max())


def test_matrices_of_one_type_are_fused() -> None:
    rng = np.random.default_rng(2)
    parts = [random_matrix("Q5_K", rows, 256, rng) for rows in (40, 8, 8)]
    joined = matrices.stacked(parts)
    assert isinstance(joined, BlockMatrix)
    np.testing.assert_array_equal(theirs(joined), np.concatenate([theirs(one) for one in parts]))


def test_parts_that_are_no_whole_panels_become_floats() -> None:
    rng = np.random.default_rng(3)
    parts = [random_matrix(kind, 40, 256, rng) for kind in ("Q5_K", "Q6_K")]
    block = matrices.matrix(matrices.stacked(parts)).block()
    expected = matrices.matrix(np.concatenate([theirs(one) for one in parts])).block()
    np.testing.assert_array_equal(block, expected)


def test_nan_reaches_its_own_row_alone(operators: Any) -> None:
    rng = np.random.default_rng(4)
    block = matrices.matrix(random_matrix("Q4_K", 40, 256, rng)).block()
    for rows in (1, 4, 20):
        x = rng.standard_normal((rows, 256), np.float32)
        before = operators.linear(block, 40, x)
        for value in (np.nan, np.inf):
            changed = x.copy()
            changed[rows // 2, 17] = value
            result = operators.linear(block, 40, changed)
            others = np.arange(rows) != rows // 2
            np.testing.assert_array_equal(result[others], before[others])
            assert not np.isfinite(result[rows // 2]).any()


def test_bits_per_weight() -> None:
    sizes = {kind.name: 8 * nbytes / span / 32 for kind, (span, nbytes) in UNITS.items()}
    assert sizes == {
        **{"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5},
        **{
            "Q2_K": 2.625,
            "Q3_K": 3.5625,
            "Q4_K": 4.625,
            "Q5_K": 5.625,
            "Q6_K": 6.5625,
            "IQ4_NL": 4.5,
            "IQ4_XS": 4.3125,
        },
    }
