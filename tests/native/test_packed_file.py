"""Every tiny model packed into a file: mapped, it computes what transformers did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from numpy.typing import NDArray

from lite_runner.backends.native import NativeBackend
from lite_runner.native.model import NativeModel, NativeOptions
from lite_runner.native.packed_file import open_packed, write_packed
from lite_runner.native.packed_model import pack
from lite_runner.weights.read_ahead import QuantizedWeights
from tests import references
from tests.conftest import Reference


@pytest.mark.parametrize("case", references.every())
def test_logits_equal_transformers(
    case: str,
    reference: Callable[[str], Reference],
    relative_error: Callable[[NDArray, NDArray], float],
    tmp_path: Path,
) -> None:
    known = reference(case)
    path = tmp_path / "model.packed"
    weights = QuantizedWeights(known.tensors(), known.config)
    with path.open("wb") as file:
        write_packed(file, known.config, pack(known.config, weights, dequantize=True))
    model = NativeModel(known.config, open_packed(path, known.config), 0)
    options = NativeOptions(slots=len(known.prompts), length=known.length)
    logits = known.run(NativeBackend(known.config, model, options))
    assert relative_error(logits, known.logits) <= 1e-5
