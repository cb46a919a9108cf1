"""A model that is computed without MindSpore gives the bits of the one that MindSpore calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends.base import Row
from lite_runner.backends.native import NativeBackend
from lite_runner.config.quantization import CacheType
from lite_runner.native.model import NativeModel, NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.conftest import Reference


def opened(known: Any, quant: str, options: NativeOptions) -> NativeBackend:
    weights = QuantizedWeights(known.tensors(quant), known.config)
    packed = pack(known.config, weights, dequantize=quant == "none")
    return NativeBackend(known.config, NativeModel(known.config, packed, 0), options)


@pytest.mark.parametrize(
    ("case", "quant", "cache"),
    [
        ("llama", "none", "fp32"),
        ("bloom", "none", "fp16"),
        ("gpt2", "a16w8", "fp32"),
        ("qwen3", "a16w4", "int8"),
        ("mistral", "none", "int8"),
        ("granite", "none", "fp32"),
        ("gemma2", "none", "fp32"),
        ("chatglm_6b", "none", "fp32"),
        ("qwen3_moe", "a16w8", "fp32"),
    ],
)
def test_the_bits_are_those_of_the_compiled_graph(
    case: str, quant: str, cache: CacheType, reference: Reference
) -> None:
    known = reference(case)
    slots = len(known.prompts)
    options = NativeOptions(slots, known.length, cache=cache)
    compiled = known.fused(slots, known.length, quant=quant, cache=cache)
    found = opened(known, quant, options)
    assert found.info.engine.startswith("native, ")
    assert replace(found.info, engine="") == replace(compiled.info, engine="")
    assert found.compile_s == 0
    wanted: NDArray[np.float32] = known.run(compiled)
    np.testing.assert_array_equal(known.run(found), wanted)
    found.grow(slots + 2, 40)
    assert (found.info.slots, found.info.max_length >= 40) == (slots + 2, True)
    np.testing.assert_array_equal(known.run(found), wanted)


def test_slots_are_copied(reference: Reference) -> None:
    known = reference("llama")
    found = opened(known, "none", NativeOptions(3, known.length, cache="int8"))
    tokens = np.arange(5, dtype=np.int32)
    after = np.array([7], np.int32)
    found.forward([Row(0, tokens, 0), Row(1, tokens + 20, 0)])
    wanted = found.forward([Row(0, after, 5), Row(1, after, 5)]).copy()
    found.copy([0, 1], [1, 2])
    np.testing.assert_array_equal(found.forward([Row(1, after, 5), Row(2, after, 5)]), wanted)
    found.close()
    found.close()
