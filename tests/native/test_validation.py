"""Layers as packing writes them pass; with any word changed they are refused, or as harmless."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Literal

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import Held, Quantization
from lite_runner.errors import ArtifactError
from lite_runner.native import matrices
from lite_runner.native.packed_model import pack
from lite_runner.native.structs import PANEL
from lite_runner.native.validation import check_layer, check_model
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.read_ahead import QuantizedWeights
from lite_runner.weights.tensor import widened
from tests.native.damage import other_words, words
from tests.native.in_numpy import BASE, NO_ROPE, step_words

Block = NDArray[np.uint8]
Reference = Callable[[str], Any]
LENGTH = 128  # positions of the cache
Form = Held | Literal["bfloat16"]  # matrices in bfloat16, with such inputs
CASES: list[tuple[str, Form]] = [
    ("llama_biases", "file"),
    ("mixtral", "file"),
    ("llama_biases", "a8"),
    ("mixtral", "a8"),
    ("llama", "a16w8"),
    ("llama_biases", "a8w8"),
    ("bloom", "a16w4"),
    ("gpt2", "none"),
    ("qwen3_tied", "a8w8"),
    ("mistral", "a16w4"),
    ("olmo2", "a16w4"),
    ("granite_biases", "a16w8"),
    ("smollm3_window", "none"),
    ("gemma2", "a16w8"),
    ("gemma3_biases", "none"),
    ("chatglm_6b", "a16w8"),
    ("starcoder2", "a16w4"),
    ("gpt_neox", "a16w8"),
    ("mixtral", "a16w4"),
    ("mixtral", "a8w8"),
    ("qwen3_moe", "none"),
    ("gpt2", "bfloat16"),
    ("mixtral", "bfloat16"),
]


class InBlocks(QuantizedWeights):
    """Matrices in blocks of GGUF, those that lie side by side in different ones."""

    def matrix(self, name: str) -> matrices.Weight:
        floats = super().matrix(name)
        assert isinstance(floats, np.ndarray)
        if floats.shape[1] % 32:
            return floats
        kind = "Q5_0" if "w1" in name or "wq" in name else "Q8_0" if "wv" in name else "Q4_1"
        data = gguf.quants.quantize(widened(floats), gguf.GGMLQuantizationType[kind])
        return BlockMatrix(kind, data, floats.shape[1])


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def packed(
    request: pytest.FixtureRequest, reference: Reference
) -> tuple[Decoder, Form, list[Block]]:
    case, quant = request.param
    known = reference(case)
    if quant == "bfloat16":
        weights = QuantizedWeights(known.tensors(dtype=quant), known.config)
    elif Quantization(quant).keeps_blocks:
        weights = InBlocks(known.tensors("none"), known.config)
    else:
        weights = QuantizedWeights(known.tensors(quant), known.config)
    layers = pack(known.config, weights, rounded_input=rounds(quant))
    return known.config, quant, [one.block for one in layers]


def rounds(form: Form) -> bool:
    return form == "bfloat16" or Quantization(form).rounds_inputs


def check(where: str, index: int, block: Block, model: Decoder, quant: Form) -> None:
    check_layer(where, index, block, model, rounded_input=rounds(quant))


def compute(operators: Any, model: Decoder, blocks: list[Block]) -> NDArray[np.float32]:
    """Logits of two tokens, as a step of an exported graph computes them."""
    step = step_words(4, np.zeros(2), np.arange(2), np.array([5, 7]), wanted=(1,))
    if model.prefix is not None:  # the second token is in the prefix too
        step = np.concatenate([step, np.array([1, 1, 0x7FFFFFF0, 0x7FFFFFF0], np.int32)])
    dim, rows = model.head_dim, model.n_kv_heads
    rope = NO_ROPE if model.rotary is None else np.ones((LENGTH, dim), np.float32)
    one = np.zeros((1, 1), np.float32)
    layers: list[NDArray[Any]] = []
    for index in range(model.num_layers):
        keys = np.zeros((rows, LENGTH // PANEL, dim, PANEL), np.float32)
        values = np.zeros((rows, -(-dim // PANEL), LENGTH, PANEL), np.float32)
        layers += [blocks[2 * index + 1], keys, values, one, one, blocks[2 * index + 2]]
    shape = (4, model.hidden_size)
    x = operators.call("Embedding", step, BASE, blocks[0], shape=shape)
    x = operators.call("Layers", x, step, rope, BASE, *layers, shape=shape)
    logits: NDArray[np.float32] = operators.call(
        "Head", x, step, BASE, blocks[-1], blocks[0], shape=(1, model.vocab_size)
    )
    return logits


def test_what_is_packed_passes_and_computes(
    packed: tuple[Decoder, Form, list[Block]], operators: Any
) -> None:
    model, quant, blocks = packed
    check_model("it", model)
    for index, block in enumerate(blocks):
        check("it", index, block, model, quant)
    assert np.isfinite(compute(operators, model, blocks)).all()


def test_no_word_leads_out_of_a_layer(
    packed: tuple[Decoder, Form, list[Block]], operators: Any
) -> None:
    """Under the sanitizers too, where a layer that passes is computed with."""
    model, quant, blocks = packed
    rng = np.random.default_rng(19)
    refused = 0
    for index in (0, 1, 2, len(blocks) - 1):
        for at in words(blocks[index], index, len(blocks)):
            (word,) = struct.unpack_from("<q", blocks[index], at)
            for other in other_words(word, rng):
                damaged = [one.copy() if i == index else one for i, one in enumerate(blocks)]
                struct.pack_into("<q", damaged[index].data, at, other)
                try:
                    check("it", index, damaged[index], model, quant)
                except ArtifactError:
                    refused += 1
                else:
                    assert compute(operators, model, damaged).shape == (1, model.vocab_size)
    assert refused > 500


def test_a_layer_of_another_length_is_refused(packed: tuple[Decoder, Form, list[Block]]) -> None:
    model, quant, blocks = packed
    for index, block in enumerate(blocks):
        longer = np.concatenate([block, np.zeros(64, np.uint8)])
        for other in (*(block[:end] for end in range(0, len(block), 64)), block[:-1], longer):
            with pytest.raises(ArtifactError, match="got"):
                check("it", index, other, model, quant)


def test_a_layer_in_place_of_another_is_refused(packed: tuple[Decoder, Form, list[Block]]) -> None:
    model, quant, blocks = packed
    for index in range(4):
        for other in range(4):
            if index % 2 != other % 2 or (0 in (index, other) and index != other):
                with pytest.raises(ArtifactError, match="got"):
                    check("it", index, blocks[other], model, quant)


def test_values_may_be_anything(packed: tuple[Decoder, Form, list[Block]], operators: Any) -> None:
    model, quant, blocks = packed
    rng = np.random.default_rng(3)
    # As sums of inputs, which int32 arithmetic holds; any others wrap, which sanitizers forbid.
    small = rng.integers(0, 1 << 23, 1 << 18, dtype=np.uint32).view(np.uint8)
    for fill in (small, np.full(1 << 20, 0xFF, np.uint8)):
        damaged = []
        for index, block in enumerate(blocks):
            kept = [(at, block[at : at + 8].copy()) for at in words(block, index, len(blocks))]
            other = block.copy()
            other[:] = fill[: len(other)]
            for at, word in kept:
                other[at : at + 8] = word
            check("it", index, other, model, quant)
            damaged.append(other)
        assert compute(operators, model, damaged).shape == (1, model.vocab_size)


def test_the_message_names_the_field_and_both_values(
    packed: tuple[Decoder, Form, list[Block]],
) -> None:
    model, quant, blocks = packed
    other = blocks[0].copy()
    other.view(np.int64)[0] = 31
    with pytest.raises(ArtifactError) as caught:
        check("a file: layer0", 0, other, model, quant)
    assert caught.value.message == f"a file: layer0: hidden: got 31, expected {model.hidden_size}"
    assert "export the model again" in caught.value.hint
