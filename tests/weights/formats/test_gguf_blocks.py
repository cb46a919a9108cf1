"""Blocks against the gguf library, which dequantizes by code of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import gguf_blocks
from lite_runner.weights.formats.gguf_blocks import INDEXED, SCHEMES, indices, integers_of, mxfp4
from lite_runner.weights.formats.gguf_checkpoint import from_gguf
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import describe, with_quantization

KINDS = tuple(SCHEMES)
SIZES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def theirs(data: np.ndarray, kind: str, shape: tuple[int, int]) -> np.ndarray:
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return np.asarray(values, np.float32).reshape(shape)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_bytes_mean_the_same_numbers(kind: str, data: st.DataObject) -> None:
    rows, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**32 - 1))
    blocks = np.random.default_rng(seed).integers(0, 256, (rows * groups, SIZES[kind]), np.uint8)
    if kind == "Q8_0":
        blocks[:, 2:][blocks[:, 2:] == 128] = 127
    # The exponents 30 and 31 are of scales that overflow when multiplied by 8, and of infinity.
    for byte in (1, 3) if kind == "Q4_1" else (1,):
        blocks[:, byte] = blocks[:, byte] & 0x80 | blocks[:, byte] % 0x6C
    found = integers_of(blocks.reshape(-1), kind, rows, 32 * groups)
    expected = theirs(blocks, kind, (rows, 32 * groups))
    # + 0.0: Q4_0 has zeros of both signs, which are equal.
    assert (found.float32() + 0.0).tobytes() == (expected + 0.0).tobytes()
    assert (found.bits, found.group) == (SCHEMES[kind].bits, SCHEMES[kind].group)


def test_any_bytes_of_mxfp4_mean_the_same_numbers() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (3000, 17), np.uint8)
    blocks[:, 0] %= 255
    found = mxfp4(blocks.reshape(-1), 500, 192).float32()
    expected = theirs(blocks, "MXFP4", (500, 192))
    normal = abs(expected) > 1e-37  # what is smaller may count as 0
    np.testing.assert_array_equal(found[normal], expected[normal])
    assert abs(found[~normal]).max() < 1e-37
    blocks[7, 0] = 255
    with pytest.raises(ArtifactError, match="a scale that is not a number"):
        mxfp4(blocks.reshape(-1), 500, 192)


def any_indexed(kind: str, rows: int, columns: int) -> np.ndarray:
    """Any blocks whose scales are numbers."""
    size, length = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    shape = (rows * columns // size, length)
    blocks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    if kind == "NVFP4":
        blocks[:, :4] &= 0x7F  # its scales have no sign
    else:  # not all bits of the exponent
        blocks[:, {"IQ1_M": 55, "TQ1_0": 53, "TQ2_0": 65}.get(kind, 1)] &= 0xBB
    blocks[0, :2] = blocks[0, -2:] = 0
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", INDEXED)
def test_any_indices_mean_the_same_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "VALUES_AT_ONCE", 1 << 12)  # several pieces
    blocks = any_indexed(kind, 19, 768)
    found = indices(blocks.reshape(-1), kind, 19, 768)
    expected = theirs(blocks, kind, (19, 768))
    assert (found.float32() + 0.0).tobytes() == (expected + 0.0).tobytes()
    assert found.bits == 4 and found.group == INDEXED[kind][1]


@pytest.mark.parametrize("kind", ["IQ2_XS", "TQ1_0", "IQ1_M"])
def test_indices_with_a_scale_that_is_no_number(kind: str) -> None:
    blocks = any_indexed(kind, 1, 256)
    blocks[0, {"IQ1_M": slice(48, None), "TQ1_0": slice(52, None)}.get(kind, slice(2))] = 0xFF
    with pytest.raises(ArtifactError, match=f"{kind} blocks: a scale that is not a number"):
        indices(blocks.reshape(-1), kind, 1, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_of_many_pieces(kind: str) -> None:
    values = np.random.default_rng(0).standard_normal((1200, 640)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    found = integers_of(data.reshape(-1), kind, 1200, 640).float32()
    np.testing.assert_array_equal(found, theirs(data, kind, values.shape))


@pytest.mark.parametrize(
    ("kind", "scale", "byte"), [("Q8_0", np.inf, 0), ("Q8_0", 1, 128), ("Q4_0", 9000, 0)]
)
def test_blocks_that_no_quantizer_writes_are_refused(kind: str, scale: float, byte: int) -> None:
    block = np.full(SIZES[kind], byte, np.uint8)
    block[:2] = np.array([scale], np.float16).view(np.uint8)
    with pytest.raises(ArtifactError, match=f"{kind} blocks"):
        integers_of(block, kind, 1, 32)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "bloom"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_keep_their_blocks(
    architecture: str,
    kind: str,
    configs: Mapping[str, Decoder],
    write_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Reordered, fused and transposed: the integers mean what the file's floats are."""
    config = configs[architecture]
    arrays = {name: one.read() for name, one in random_checkpoint(config, 0).items()}
    path = write_gguf(tmp_path / "x.gguf", config, architecture, arrays, kind=kind)
    plain = from_gguf(open_gguf(path), config)
    quantization = Quantization.of("a16w8" if kind == "Q8_0" else "a16w4", None)
    tensors = with_quantization(plain, config, quantization)
    matrices = {name: one for name, one in tensors.items() if one.integers is not None}
    taken = [one for one in matrices.values() if one.integers and one.integers.stored]
    # With four bits the embedding and the head are wanted finer than the file has them.
    finer = 0 if kind == "Q8_0" else 1 + (not config.tie_word_embeddings)
    assert len(taken) == len(matrices) - finer > 10
    assert f"{len(taken)} matrices as the checkpoint holds them" in describe(tensors, quantization)
    for name, one in matrices.items():
        assert one.integers is not None
        floats = one.integers.read().float32()
        same = floats if one.shape == floats.shape and name not in turned(config) else floats.T
        np.testing.assert_array_equal(one.float32(), same)
        if one.integers.stored:
            np.testing.assert_array_equal(one.float32(), plain[name].float32())


def turned(config: Decoder) -> set[str]:
    """bloom's and gpt2's layers that MindFormers holds [in, out]."""
    if config.rotary is not None:
        return set()
    layers = ("attention.projection", "output.mapping", "output.projection")
    stem = "blocks" if config.attention.alibi else "backbone.blocks"
    return {f"{stem}.{i}.{name}.weight" for i in range(config.num_layers) for name in layers}
