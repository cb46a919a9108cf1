from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quant, Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.config import schema
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.weights import DType, LazyBlocks, LazyTensor, narrowed, widened
from lite_runner.weights.formats.gguf_checkpoint import from_gguf
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.formats.safetensors_file import (
    NUMPY_TYPES,
    open_safetensors,
    write_safetensors,
)
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import describe, with_matrices_in, with_quantization
from lite_runner.weights.quantization.quantized import VALUES_AT_ONCE, QuantizedTensor, quantize
from lite_runner.weights.read_ahead import QuantizedWeights
from lite_runner.weights.sharding.partition import pieces
from tests.each import each

QUANTS: list[Quant] = ["none", "a16w8", "a16w4", "a8w8"]


def test_schemes_of_matrices(config: Decoder) -> None:
    four = schemes(config, Quantization.of("a16w4", None))
    table = parameters(config)
    assert four[table[0].name] == Scheme(8, 32)  # the embedding
    layers = [name for name, scheme in four.items() if scheme == Scheme(4, 32)]
    assert len(layers) == config.num_layers * (7 if config.feed_forward.gated else 6)
    assert not any("norm" in name or "bias" in name or "position" in name for name in four)
    assert ("lm_head.weight" in four) is not config.tie_word_embeddings
    eight = schemes(config, Quantization.of("a16w8", None))
    assert eight.keys() == four.keys() and set(eight.values()) == {Scheme(8, 0)}
    assert schemes(config, Quantization.of("a8w8", None)) == eight
    assert schemes(config, Quantization()) == {}


@each(("quant", "dtype"), [*itertools.product(QUANTS, ("F32", "F16", "BF16"))])
def test_weights_as_a_backend_takes_them(
    config: Decoder,
    quant: Quant,
    dtype: DType,
    values: Callable[..., dict[str, LazyTensor]],
    tmp_path: Path,
) -> None:
    """Read from a file in slices, out-major, and the floats are the integers' own."""
    path = tmp_path / f"{quant}_{dtype}.safetensors"
    write_safetensors(path, values(config, dtype), {})
    plain = open_safetensors(path)
    quantization = Quantization.of(quant, None)
    tensors = with_quantization(plain, config, quantization)
    wanted = schemes(config, quantization)
    taken = []
    weights = QuantizedWeights(tensors, config, taken.append)
    for one in parameters(config):
        source = plain[one.name].float32()
        if one.layout == "plain" and one.name not in wanted and len(one.shape) == 1:
            np.testing.assert_array_equal(weights.vector(one.name), source)
            continue
        got = weights.matrix(one.name)
        out_in = source.T if one.layout == "in_out" else source
        if one.name not in wanted:
            assert isinstance(got, np.ndarray) and got.flags.c_contiguous
            assert got.dtype == NUMPY_TYPES[dtype]  # as it is stored
            np.testing.assert_array_equal(widened(got), out_in)
            continue
        assert isinstance(got, QuantizedTensor)
        scheme = wanted[one.name]
        same = quantize(out_in, scheme.bits, scheme.group)
        np.testing.assert_array_equal(got.values, same.values)
        np.testing.assert_array_equal(got.scales, same.scales)
        floats = tensors[one.name].float32()
        np.testing.assert_array_equal(floats.T if one.layout == "in_out" else floats, got.float32())
    weights.close()
    assert sum(taken) == len(parameters(config))
    with pytest.raises(KeyError):
        weights.matrix(parameters(config)[0].name)


def test_the_line_about_it(config: Decoder) -> None:
    quantization = Quantization.of("a16w4", 32)
    whole = with_quantization(random_checkpoint(config, 0), config, quantization)
    # A rank's part of a model keeps the integers of what can be cut by whole groups.
    part = pieces(whole, config, Ranks(tensor=2), vocab_parallel=True)
    for tensors in (whole, part):
        count = sum(one.integers is not None for one in tensors.values())
        expected = f"quant=a16w4 quant_group=32: {count} matrices rounded as they are read"
        assert count and describe(tensors, quantization) == expected


def test_a_group_that_does_not_fit_is_refused_before_reading(configs: dict[str, Decoder]) -> None:
    def unread() -> np.ndarray:
        raise AssertionError("read")

    config = configs["llama"]  # hidden size 32
    shapes = {one.name: one.shape for one in parameters(config)}
    tensors = {name: LazyTensor(shape, "F32", unread) for name, shape in shapes.items()}
    with pytest.raises(ArtifactError, match=r"wq\.weight: 32 columns, expected a multiple .* 64"):
        with_quantization(tensors, config, Quantization.of("a16w4", 64))


def test_requantized_blocks_are_reported(
    configs: dict[str, Decoder], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    config = configs["llama"]
    arrays = {name: one.read() for name, one in random_checkpoint(config, 0).items()}
    plain = from_gguf(
        open_gguf(write_gguf(tmp_path / "x", config, "llama", arrays, kind="Q5_0")), config
    )
    quantization = Quantization.of("a16w4", 32)
    described = describe(with_quantization(plain, config, quantization), quantization)
    linear = sum(scheme.bits == 4 for scheme in schemes(config, quantization).values())
    assert f"; {linear} of them are Q5_0 in the file, and lose accuracy" in described
    assert described.endswith("-> quant=a16w8 keeps nearly all of it, quant=null all")
    finer = Quantization.of("a16w8", None)
    assert "lose" not in describe(with_quantization(plain, config, finer), finer)


Floats = NDArray[np.float32]


def lazy(values: Floats, *, slices: bool = False) -> LazyTensor:
    part = (lambda index: np.ascontiguousarray(values[index])) if slices else None
    return LazyTensor(values.shape, "F32", lambda: values, part)


def nearest(values: Floats, dtype: schema.DType) -> Floats:
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    mantissas, exponents = np.frexp(values)
    return np.ldexp(np.rint(mantissas * 256) / 256, exponents)


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrices_are_rounded_to_the_nearest(dtype: schema.DType, slices: bool) -> None:
    rng = np.random.default_rng(0)
    # Of every size that float16 has, in more than is rounded at a time.
    values = rng.standard_normal((3, VALUES_AT_ONCE // 2)).astype(np.float32)
    values *= np.float32(2) ** rng.integers(-30, 13, values.shape)
    (found,) = with_matrices_in({"w": lazy(values, slices=slices)}, dtype).values()
    assert found.nbytes == values.nbytes // 2
    wanted = nearest(values, dtype)
    assert (wanted != values).any()
    np.testing.assert_array_equal(found.float32(), wanted)
    index = (slice(1, 3), slice(5, 9))
    np.testing.assert_array_equal(found.piece(index), found.read()[index])


def test_tensors_that_are_not_rounded() -> None:
    values = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    tensors = {
        "bias": lazy(values[0]),
        "half": LazyTensor((3, 4), "F16", lambda: narrowed(values, "F16")),
        "brain": LazyTensor((3, 4), "BF16", lambda: narrowed(values, "BF16")),
    }
    for dtype in ("float16", "bfloat16"):
        assert with_matrices_in(tensors, dtype) == tensors
    matrices = {"w": lazy(values)}
    assert with_matrices_in(matrices, "float32") == matrices


def test_blocks_stay_beside_rounded_floats() -> None:
    own = LazyBlocks("Q8_0", 34, lambda: pytest.fail("read"))
    held = replace(lazy(np.ones((1, 32), np.float32)), block_type="Q8_0", blocks=own)
    (found,) = with_matrices_in({"w": held}, "float16").values()
    assert found.dtype == "F16" and found.blocks is own


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 65520.0, -7e4])
def test_values_too_large_for_float16_are_refused(value: float) -> None:
    values = np.zeros((4, 5), np.float32)
    values[2, 3] = value
    (found,) = with_matrices_in({"w": lazy(values)}, "float16").values()
    with pytest.raises(
        ArtifactError, match="w: a value that is not a number, or too large for F16"
    ):
        found.read()
    values[2, 3] = 65519.0
    assert found.read()[2, 3] == 65504


def test_values_too_large_for_bfloat16_are_refused() -> None:
    values = np.full((2, 2), np.finfo(np.float32).max)
    (found,) = with_matrices_in({"w": lazy(values)}, "bfloat16").values()
    with pytest.raises(ArtifactError, match="too large for BF16"):
        found.read()
    values[:] = 3.389e38
    np.testing.assert_array_equal(found.float32(), nearest(values, "bfloat16"))
    values[1, 1] = np.nan
    with pytest.raises(ArtifactError, match="not a number"):
        found.read()
