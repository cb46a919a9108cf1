"""Prefix LMs: prompts longer than a chunk, several at once, copied, and after larger caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import chatglm_6b, reference
from lite_runner.architectures.quantization import Quant, Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend, Growing, Row
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native.backend import NativeBackend, NativeOptions, TokenBatch
from lite_runner.native.packed_model import pack
from lite_runner.weights import LazyTensor
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead

TOLERANCE = 1e-4
GMASK, MASK, SOP = 97, 96, 98
LENGTH = 768
Error = Callable[[NDArray, NDArray], float]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return chatglm_6b.decoder(
        num_layers=2,
        num_heads=4,
        head_dim=16,
        intermediate_size=160,
        norm_eps=1e-5,
        end_token_id=SOP,
        mask_token_ids=(GMASK, MASK),
        vocab_size=100,
        hidden_size=64,
        seq_length=LENGTH,
        tie_word_embeddings=False,
        bos_token_id=SOP,
    )


@pytest.fixture(scope="module")
def prompts() -> list[NDArray[np.int32]]:
    """Prefixes of 600, 3 and 140 tokens, the last with text behind its end."""
    text = np.random.default_rng(3).integers(0, 96, 1000).astype(np.int32)
    return [
        np.array([*text[:599], GMASK, SOP], np.int32),
        np.array([*text[600:602], MASK, SOP], np.int32),
        np.array([*text[610:700], GMASK, *text[700:749], SOP, *text[800:811]], np.int32),
    ]


@pytest.fixture(scope="module")
def tensors(model: Decoder) -> dict[str, LazyTensor]:
    """Ten times as large as random ones are, so that tokens see more than the mean of the keys."""
    drawn = random_checkpoint(model, 1)

    def larger(tensor: LazyTensor) -> LazyTensor:
        values = tensor.float32() * np.float32(10 if len(tensor.shape) == 2 else 1)
        return LazyTensor(tensor.shape, "F32", lambda: values)

    return {name: larger(tensor) for name, tensor in drawn.items()}


def native(
    model: Decoder, tensors: dict[str, LazyTensor], slots: int = 3, quant: Quant = "none"
) -> NativeBackend:
    held = with_quantization(tensors, model, Quantization.of(quant, None))
    layers = pack(model, QuantizedWeights(held, model))
    return NativeBackend(model, layers, NativeOptions(slots, LENGTH))


@pytest.fixture(scope="module")
def mindspore(model: Decoder, tensors: dict[str, LazyTensor]) -> MindSporeBackend:
    """Compiled once."""
    return MindSporeBackend(model, ReadAhead(tensors), MindSporeOptions(3, LENGTH))


def computed(model: Decoder, tensors: dict[str, LazyTensor], tokens: NDArray) -> NDArray:
    return reference.forward(model, {name: one.read() for name, one in tensors.items()}, tokens)


def answers(backend: Backend, prompts: list[NDArray], forced: NDArray) -> NDArray:
    """Logits [prompts, steps + 1, vocab]: all prompts together, then some tokens."""
    rows = [Row(slot, prompt, 0) for slot, prompt in enumerate(prompts)]
    found = [backend.forward(rows)]
    for step, token in enumerate(forced):
        rows = [Row(slot, token[None], len(one) + step) for slot, one in enumerate(prompts)]
        found.append(backend.forward(rows))
    return np.stack(found, axis=1)


FORCED = np.array([5, SOP, 7, GMASK, 9], np.int32)


@pytest.fixture(params=["native", "mindspore"])
def backend(
    request: pytest.FixtureRequest, model: Decoder, tensors: dict[str, LazyTensor]
) -> Backend:
    if request.param == "native":
        return native(model, tensors)
    found: MindSporeBackend = request.getfixturevalue("mindspore")
    return found


def test_long_prefixes(
    backend: Backend,
    model: Decoder,
    tensors: dict[str, LazyTensor],
    prompts: list[NDArray],
    relative_error: Error,
) -> None:
    assert backend.info.chunk == LENGTH and not backend.info.can_continue
    found = answers(backend, prompts, FORCED)
    for logits, prompt in zip(found, prompts, strict=True):
        wanted = computed(model, tensors, np.concatenate([prompt, FORCED]))[len(prompt) - 1 :]
        assert relative_error(logits, wanted) <= TOLERANCE
    # The prefix reaches behind a token: without it the logits are others.
    plain = np.array([*prompts[0][:-1], 5], np.int32)
    other = computed(model, tensors, plain)[598]
    assert relative_error(other, computed(model, tensors, prompts[0])[598]) > 0.01


@pytest.mark.parametrize("quant", ["a16w8", "a16w4"])
def test_quantized(
    quant: Quant,
    model: Decoder,
    tensors: dict[str, LazyTensor],
    prompts: list[NDArray],
    relative_error: Error,
) -> None:
    """Against the same integers as floats, which are rounded to 16 bits where they are not."""
    held = with_quantization(tensors, model, Quantization.of(quant, None))
    floats = {name: LazyTensor(one.shape, "F32", one.float32) for name, one in held.items()}
    found = answers(native(model, tensors, quant=quant), prompts, FORCED)
    assert relative_error(found, answers(native(model, floats), prompts, FORCED)) <= 5e-4


def test_slots_keep_their_prefix(backend: Backend, prompts: list[NDArray]) -> None:
    """Alone, beside others, after a copy, and of a prompt that starts over."""
    short, long = prompts[1], prompts[2]
    backend.forward([Row(0, short, 0), Row(1, long, 0)])
    following = [Row(0, FORCED[:1], len(short)), Row(1, FORCED[:1], len(long))]
    before = backend.forward(following)
    assert np.array_equal(backend.forward(following[1:]), before[1:])
    backend.copy([1, 0], [0, 1])
    swapped = [Row(1, FORCED[:1], len(short)), Row(0, FORCED[:1], len(long))]
    assert np.array_equal(backend.forward(swapped), before)
    backend.forward([Row(0, short, 0)])
    assert np.array_equal(backend.forward([Row(0, FORCED[:1], len(short))]), before[:1])
    if isinstance(backend, MindSporeBackend):  # it would be compiled once more: see test_growing.py
        return
    assert isinstance(backend, Growing)
    backend.grow(4, LENGTH)
    backend.forward([Row(3, long, 0)])
    again = backend.forward([Row(3, FORCED[:1], len(long))])
    assert np.abs(again - before[1:]).max() <= TOLERANCE * np.abs(before).max()


def test_a_prompt_is_not_split() -> None:
    rows = [
        Row(slot, np.arange(length, dtype=np.int32), 0) for slot, length in enumerate((4, 5, 3))
    ]
    every = TokenBatch.of(rows)
    parts = [(part.start, part.stop) for part, _ in every.parts(8, 9, whole_rows=True)]
    assert parts == [(0, 4), (4, 12)]
    with pytest.raises(ValueError, match="does not fit a step of 4 tokens"):
        list(every.parts(4, 9, whole_rows=True))
