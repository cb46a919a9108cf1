"""Folders in compressed-tensors' form that are written, read back and unpacked by NumPy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.compressed_tensors import (
    check_writable,
    tensors_bytes,
    write_folder,
)
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.gptq import calibrated
from tests.paths import REFERENCE

QUERY = "model.layers.0.self_attn.q_proj"
KINDS = [Quantization("a16w4", 32), Quantization("a16w8")]


def meant(folder: Path, name: str, bits: int) -> np.ndarray:
    """A layer's weights, computed from its tensors as the format describes."""
    stored = load_file(folder / "model.safetensors")
    rows, columns = stored[f"{name}.weight_shape"]
    words = stored[f"{name}.weight_packed"].view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & ((1 << bits) - 1)).reshape(rows, columns).astype(int)
    scales = stored[f"{name}.weight_scale"].astype(np.float32)
    return (codes - (1 << bits - 1)) * np.repeat(scales, columns // scales.shape[1], axis=1)


@pytest.mark.parametrize("quantization", KINDS, ids=str)
@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3", "gemma2"])
def test_a_written_file_is_read_back(
    case: str, quantization: Quantization, tmp_path: Path, configs: Mapping[str, Decoder]
) -> None:
    model = configs.get(case) or model_config_of(REFERENCE / case)
    assert model is not None
    check_writable(model, quantization, calibrated=False)
    source, done = random_checkpoint(model, 0), list[int]()
    write_folder(tmp_path, source, model, quantization, calibrated=False, advance=done.append)
    assert sum(done) == len(source)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 0 < size - tensors_bytes(model, quantization) < 16000  # of names and shapes
    read = model_config_of(tmp_path)
    assert read == model
    largest = 0.2 if quantization.quant == "a16w4" else 0.005
    for name, found in open_checkpoint(tmp_path, model).items():
        expected = source[name].float32()
        assert np.abs(found.float32() - expected).max() <= largest * np.abs(expected).max(), name
        assert (found.block_type != "") == (".layers." in name and expected.ndim == 2), name
    if case == "llama":
        bits = 4 if quantization.group else 8
        (query,) = (one.name for one in parameters(model) if one.hugging_face == f"{QUERY}.weight")
        np.testing.assert_array_equal(
            meant(tmp_path, QUERY, bits), open_checkpoint(tmp_path, model)[query].float32()
        )


def test_calibrated_integers_are_written_unchanged(
    tmp_path: Path, configs: Mapping[str, Decoder]
) -> None:
    model, quantization = configs["llama"], Quantization("a16w4", 32)
    texts = np.random.default_rng(0).integers(0, 40, (4, 24)).astype(np.int32)
    source = random_checkpoint(model, 0)
    held = calibrated(source, model, quantization, texts, around_zero=True)
    write_folder(tmp_path, held, model, quantization, calibrated=True)
    found = open_checkpoint(tmp_path, model)
    linear = [one.name for one in parameters(model) if one.is_linear and one.layer is not None]
    for name in linear:
        assert held[name].integers is not None
        np.testing.assert_array_equal(found[name].float32(), held[name].float32())


def test_modules_that_stay_floats_are_ignored_by_name(
    tmp_path: Path, configs: Mapping[str, Decoder]
) -> None:
    model, quantization = configs["llama"], Quantization("a16w8", kept=("w2",))
    source = random_checkpoint(model, 0)
    write_folder(tmp_path, source, model, quantization, calibrated=False)
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == [
        "lm_head",
        *(f"model.layers.{layer}.mlp.down_proj" for layer in range(model.num_layers)),
    ]
    found = open_checkpoint(tmp_path, model)
    kept = [name for name in found if "w2" in name]
    assert kept and all(found[name].dtype == "F16" for name in kept)


def test_matrices_that_the_format_cannot_hold_are_reported(configs: Mapping[str, Decoder]) -> None:
    four, mixtral = Quantization("a16w4", 32), model_config_of(REFERENCE / "mixtral")
    phi3 = model_config_of(REFERENCE / "phi3")
    assert mixtral is not None and phi3 is not None
    with pytest.raises(ConfigError, match="gpt2 has Conv1D layers"):
        check_writable(configs["gpt2"], four, calibrated=False)
    with pytest.raises(ConfigError, match="mixtral has experts"):
        check_writable(mixtral, four, calibrated=False)
    with pytest.raises(ConfigError, match="calibrated matrices are rounded apart"):
        check_writable(phi3, four, calibrated=True)
    with pytest.raises(ArtifactError, match="expected a multiple of the group of 128"):
        check_writable(configs["llama"], Quantization("a16w4", 128), calibrated=False)
