"""The layer for multi-token prediction: its logits, and its drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.next_token import next_token_layer
from lite_runner.architectures.quantization import Quantization
from lite_runner.backends import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ArtifactError
from lite_runner.generation import Engine, Request
from lite_runner.generation.speculation import MOST_DRAFTED, StepCost
from lite_runner.weights.checkpoint import open_checkpoint
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized_checkpoint import write_quantized
from tests.newer_gguf import write_newer_gguf
from tests.next_token import CASES, REFERENCE, config_at, with_layer, write_with_layer
from tests.paths import FIXTURES

EXPECTED = np.load(FIXTURES / "next_token.npz")


def prompt_of(case: str) -> NDArray[np.int32]:
    """The longest one."""
    expected = np.load(REFERENCE / case / "expected.npz")
    longest = expected["lengths"].argmax()
    return expected["prompts"][longest].astype(np.int32)


def test_logits_are_those_of_the_published_formula(
    tmp_path: Path, relative_error: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a text comes, and whatever has been refused: behind the newest token the layer drafts
    what the logits say."""
    monkeypatch.setattr("lite_runner.backends.native.next_token.LATE", 4)
    for case in CASES:
        backend = with_layer(write_with_layer(case, tmp_path / case), 3, 320)
        tokens, expected = prompt_of(case), EXPECTED[case]
        layer, count = backend.next_token, len(tokens)
        assert layer is not None
        hidden = backend.hidden([Row(0, tokens, 0, logits=count, hidden=True)])
        logits, _ = layer._run([Row(1, tokens[1:], 0, logits=count - 1)], list(hidden[:-1]))
        assert relative_error(logits, expected) < 1e-4, case
        random, best = np.random.default_rng(1), expected.argmax(axis=1)
        place = checked = 0
        while place < count - 8:
            row = tokens[place : place + random.choice([1, 1, 2, 3, 7])]
            refused = random.integers(0, 64, random.integers(0, 4)).astype(np.int32)
            every = np.concatenate([row, refused])
            logits = 1 + len(refused)
            backend.forward([Row(2, every, place, logits=logits, drafts=len(refused) > 0)])
            place += len(row)
            if random.random() < 0.9:
                newest = Row(2, tokens[place : place + 1], place)
                ((first, *_),) = layer.draft([newest], [int(random.integers(1, 4))])
                second, largest = np.partition(expected[place - 1], -2)[-2:]
                if largest - second > 1e-3:
                    assert first == best[place - 1], (case, place)
                    checked += 1
        assert checked > 3, case


def test_correct_drafts_of_the_layer_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the numbers of `agreeing_tensors`; texts come in turn, with the prefix of one before."""
    monkeypatch.setattr(StepCost, "most", lambda *_: MOST_DRAFTED)
    for case in CASES:
        engine = Engine(with_layer(write_with_layer(case, tmp_path / case, 0.0), 3, 320))
        options = GenerationConfig(max_new_tokens=80, eos_token_id=())
        for size in (1, 60, 200):
            prompt = np.arange(size, dtype=np.int32) % 64
            timing = engine.generate([Request(prompt, options), Request(prompt, options)]).timing
            assert timing.decode_tokens == 2 * 79
            assert timing.accepted_tokens == timing.drafted_tokens > 130, (case, size)


def test_gguf_files_have_the_same_layer(tmp_path: Path) -> None:
    """Written by the gguf package, under llama.cpp's names; the order of rows is ours then."""
    folder = write_with_layer("glm4_moe", tmp_path / "glm4_moe")
    write_newer_gguf(tmp_path / "x.gguf", folder, further=True)
    layer = next_token_layer(config_at(folder))
    assert layer is not None
    expected = open_checkpoint(folder, layer)
    found = open_checkpoint(tmp_path / "x.gguf", layer)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name].read(), tensor.read()), name


def test_files_without_a_layer_are_refused(tmp_path: Path) -> None:
    model, quantization = config_at(REFERENCE / "glm4_moe"), Quantization.of("a16w8", None)
    layer = next_token_layer(model)
    assert layer is not None
    write_newer_gguf(tmp_path / "x.gguf", REFERENCE / "glm4_moe")
    tensors = with_quantization(random_checkpoint(model, 0), model, quantization)
    (tmp_path / "quantized").mkdir()
    write_quantized(tmp_path / "quantized", tensors, model, quantization, "random")
    for path in (REFERENCE / "glm4_moe", tmp_path / "x.gguf", tmp_path / "quantized"):
        with pytest.raises(ArtifactError, match="has no layer for multi-token prediction"):
            open_checkpoint(path, layer)
