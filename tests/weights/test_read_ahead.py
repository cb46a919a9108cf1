"""Tensors read ahead: integers that cannot be read, and whose floats will do."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from lite_runner.architectures.quantization import Quantization, schemes
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyIntegers, LazyTensor
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.quantization.quantized import QuantizedTensor
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from tests.models import model_named


def unreadable() -> QuantizedTensor:
    raise ArtifactError("the integers are damaged")


def test_damaged_integers_do_not_become_floats() -> None:
    """The file says that the model is quantized: what the floats make of it is another model."""
    model = model_named("tiny_llama")
    name, scheme = next(iter(schemes(model, Quantization.of("a16w8", None)).items()))
    floats = LazyTensor(expected_tensors(model)[name], "F32", lambda: np.ones(1, np.float32))
    stored = LazyIntegers(scheme, unreadable, stored=True)
    weights = QuantizedWeights({name: replace(floats, integers=stored)}, model)
    with pytest.raises(ArtifactError, match="the integers are damaged"):
        weights.matrix(name)
    own = replace(stored, optional=True)  # rounded here from those very floats
    weights = QuantizedWeights({name: replace(floats, integers=own)}, model)
    assert weights.matrix(name).tolist() == [1.0]


def test_unread_tensors_are_dropped_at_the_end() -> None:
    array = np.ones(3, np.float32)
    held = weakref.ref(array)
    arrays = [array]
    del array
    weights = ReadAhead({"a": LazyTensor((3,), "F32", arrays.pop)})
    weights.close()
    deadline = time.monotonic() + 60
    while held() is not None:  # the reader's thread may not be done
        assert time.monotonic() < deadline
        time.sleep(0.001)
