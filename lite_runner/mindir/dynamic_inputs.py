"""The inputs of the `dynamic` graph."""

from __future__ import annotations

from lite_runner.mindir.manifest import TensorSpec

INPUTS = (
    TensorSpec("tokens", (1, -1), "int32"),
    TensorSpec("position", (1,), "int32"),  # position id of the first token
    TensorSpec("length", (1,), "int32"),  # sequence length of the row, with these tokens
    TensorSpec("slot", (1,), "int32"),
)
