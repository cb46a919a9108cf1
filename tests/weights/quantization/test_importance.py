"""Importance matrices of a mixture of experts, in both of llama.cpp's forms."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures import parameters
from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization import importance
from lite_runner.weights.quantization.importance import (
    Importance,
    importance_file,
    measured_importance,
    read_importance,
)
from tests.paths import REFERENCE

MODEL = model_config_of(REFERENCE / "mixtral")
GATES = "blk.0.ffn_gate_exps.weight"
TOKENS = np.zeros((2, 8), np.int32)  # sent to few experts


def dat(importance: Importance, calls: int = 3) -> bytes:
    """As llama-imatrix wrote files before it wrote GGUF: means times calls, experts in a row."""
    entries = [
        struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
        + (values * calls).astype("<f4").tobytes()
        for name, values in importance.items()
    ]  # fmt: skip
    return struct.pack("<i", len(entries)) + b"".join(entries)


def test_experts_in_both_forms(tmp_path: Path) -> None:
    assert MODEL is not None and MODEL.sparse is not None and MODEL.sparse.experts is not None
    layers: list[int] = []
    measured = measured_importance(
        random_checkpoint(MODEL, 0), MODEL, TOKENS, advance=layers.append
    )
    assert measured.keys() == {one.gguf for one in parameters(MODEL) if one.is_linear}
    gates = measured[GATES]
    assert len(gates) == MODEL.sparse.experts.count and len(layers) == MODEL.num_layers
    # Of an expert that no token was sent to nothing is known.
    assert any((one == 1).all() for one in gates) and not (gates == 1).all()
    for name, data in (
        ("x.gguf", importance_file(measured, "a text", TOKENS.size)),
        ("x.dat", dat(measured)),
    ):
        (tmp_path / name).write_bytes(data)
        found = read_importance(tmp_path / name, MODEL)
        assert found.keys() == measured.keys()
        for key, values in measured.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-6, err_msg=f"{name} {key}")
    for values in (gates[:3], gates[:, 1:]):
        for name, data in (
            ("x.gguf", importance_file({GATES: values}, "a text", TOKENS.size)),
            ("x.dat", dat({GATES: values})),
        ):
            (tmp_path / name).write_bytes(data)
            with pytest.raises(ArtifactError, match=f"{GATES} has .* inputs, expected"):
                read_importance(tmp_path / name, MODEL)


def test_files_that_are_none_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODEL is not None
    empty = importance_file({GATES: np.zeros((1, 0), np.float32)}, "a text", 8)
    (tmp_path / "x.gguf").write_bytes(empty)
    with pytest.raises(ArtifactError, match=f"{GATES} has no inputs"):
        read_importance(tmp_path / "x.gguf", MODEL)
    monkeypatch.setattr(importance, "MAX_BYTES", 100)
    (tmp_path / "x.dat").write_bytes(bytes(101))
    with pytest.raises(ArtifactError, match="more than 100 bytes") as caught:
        read_importance(tmp_path / "x.dat", MODEL)
    assert "quantize.data=" in caught.value.hint
