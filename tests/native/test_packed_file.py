"""Every tiny model packed into a file: mapped, it computes what transformers did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from numpy.typing import NDArray

from lite_runner.backends.native import NativeBackend
from lite_runner.native.model import NativeModel, NativeOptions
from lite_runner.native.packed_file import open_packed, write_packed
from lite_runner.native.packed_model import pack, packed_layers
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
        write_packed(
            file,
            known.config,
            lambda room: packed_layers(known.config, weights, dequantize=True, room=room),
        )
    layers = open_packed(path, known.config)
    again = pack(known.config, QuantizedWeights(known.tensors(), known.config), dequantize=True)
    # Memory that one layer left behind is no part of another.
    assert [one.block.tobytes() for one in layers] == [one.block.tobytes() for one in again]
    model = NativeModel(known.config, layers, 0)
    options = NativeOptions(slots=len(known.prompts), length=known.length)
    logits = known.run(NativeBackend(known.config, model, options))
    assert relative_error(logits, known.logits) <= 1e-5


def test_a_layer_that_cannot_be_written_ends_in_its_error(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    known = reference("llama")
    weights = QuantizedWeights(known.tensors(), known.config)
    path = tmp_path / "model.packed"
    path.touch()
    with path.open("rb") as read_only, pytest.raises(OSError, match="write"):
        write_packed(
            read_only,
            known.config,
            lambda room: packed_layers(known.config, weights, dequantize=True, room=room),
        )
    weights.close()
