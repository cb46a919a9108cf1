"""MindFormers' checkpoints of MindSpore Golden Stick that are written, and read back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.ckpt_file import open_ckpt
from lite_runner.weights.formats.golden_stick import (
    FILE,
    check_writable,
    tensors_bytes,
    write_folder,
)
from lite_runner.weights.formats.safetensors_file import StoredTensor
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.gptq import calibrated
from lite_runner.weights.quantization.quantized import quantize, quantize_around_zero
from tests.paths import FIXTURES, REFERENCE

WK = "model.layers.0.attention.wk"


def stored(file: Path) -> dict[str, str]:
    """The types of the tensors of a layer, by the end of their names."""
    others: dict[str, StoredTensor] = {}
    every = {**open_ckpt(file, others), **others}
    return {name.removeprefix(WK): one.dtype for name, one in every.items() if WK in name}


@pytest.mark.parametrize(
    ("quantization", "theirs"),
    [
        (Quantization("a16w8"), "a16w8"),
        (Quantization("a8w8"), "a8dyn"),
        (Quantization("a16w4", 32), "a16w4_group_64"),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_a_written_file_is_read_back(
    case: str,
    quantization: Quantization,
    theirs: str,
    tmp_path: Path,
    configs: Mapping[str, Decoder],
) -> None:
    model = configs[case]
    check_writable(model, quantization, calibrated=False)
    source, done = random_checkpoint(model, 0), list[int]()
    write_folder(tmp_path, source, model, quantization, calibrated=False, advance=done.append)
    assert sum(done) == len(source)
    assert 0 < (tmp_path / FILE).stat().st_size - tensors_bytes(model, quantization) < 16000
    # Names and types are those that mindspore_gs has written.
    expected = stored(FIXTURES / "golden_stick" / f"{theirs}.ckpt")
    found = stored(tmp_path / FILE)
    biases = {"._layer.bias": "F16"} if case == "qwen2" else {}
    assert found == expected | biases
    linear = {one.name for one in parameters(model) if one.is_linear}
    for name, one in open_checkpoint(tmp_path, model).items():
        values = source[name].float32()
        if name in linear and name in schemes(model, quantization):
            around = quantization.group and quantize_around_zero(values, quantization.group)
            meant = (around or quantize(values, 8, 0)).float32()
            np.testing.assert_array_equal(one.float32(), meant, name)
        else:
            np.testing.assert_allclose(one.float32(), values, rtol=1e-3, atol=1e-6)


def test_calibrated_integers_are_written_unchanged(
    tmp_path: Path, configs: Mapping[str, Decoder]
) -> None:
    model, quantization = configs["llama"], Quantization("a16w4", 32)
    texts = np.random.default_rng(0).integers(0, 40, (4, 24)).astype(np.int32)
    held = calibrated(random_checkpoint(model, 0), model, quantization, texts, around_zero=True)
    write_folder(tmp_path, held, model, quantization, calibrated=True)
    found = open_checkpoint(tmp_path, model)
    for one in parameters(model):
        if one.is_linear:
            np.testing.assert_array_equal(found[one.name].float32(), held[one.name].float32())


def test_matrices_that_the_form_cannot_hold_are_reported(configs: Mapping[str, Decoder]) -> None:
    four = Quantization("a16w4", 32)
    mixtral = model_config_of(REFERENCE / "mixtral")
    assert mixtral is not None
    for model, says in ((configs["gpt2"], r"\[in, out\]|matrices in one"), (mixtral, "an expert")):
        with pytest.raises(ConfigError, match=says):
            check_writable(model, four, calibrated=False)
    with pytest.raises(ArtifactError, match="expected a multiple of the group of 128"):
        check_writable(configs["llama"], Quantization("a16w4", 128), calibrated=False)
