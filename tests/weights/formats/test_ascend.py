"""Checkpoints of MindSpore Golden Stick and msModelSlim: their values, and refused ones.

tests/fixtures/golden_stick: a matrix as mindspore_gs 1.0 (RTN) and 1.2 (PTQ) wrote it, and its
floats; modelslim: matrices as the saver of msmodelslim 26.1 wrote them, and what they mean. Whole
folders of msModelSlim are among the layouts of test_packed_matrices.py."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import open_checkpoint, tensors_at
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt_entries
from lite_runner.weights.formats.packed_matrix import array_of
from lite_runner.weights.formats.safetensors_file import Entry, StoredTensor
from tests.packed_folders import MODEL, write_folder
from tests.paths import FIXTURES

GOLDEN = FIXTURES / "golden_stick"
NAME = "model.layers.0.attention.wk.weight"
Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "source", "bits", "steps"),
    [
        ("rtn", "float", 8, 127),
        ("a16w8", "float", 8, 127),
        ("a8dyn", "float", 8, 127),
        ("a16w4", "float", 4, 7),
        ("a16w4_group_64", "float_128", 4, 7),
        ("smooth", "float", None, 64),  # a scale for each input too: floats
    ],
)
def test_golden_stick_means_its_floats(
    name: str, source: str, bits: int | None, steps: int
) -> None:
    found = tensors_at(GOLDEN / f"{name}.ckpt")
    assert found.keys() == {NAME}
    expected = tensors_at(GOLDEN / f"{source}.ckpt")[NAME].float32()
    got = found[NAME]
    assert (got.integers and got.integers.scheme.bits) == bits
    largest = np.abs(expected).max(1, keepdims=True)
    assert (np.abs(got.float32() - expected) <= 0.51 * largest / steps).all()


@pytest.mark.parametrize(
    ("part", "shape", "says"),
    [
        ("quant_bias", (31,), r"quant_bias is \[31\], expected \[32\]"),
        ("input_zp", (63,), r"input_zp is \[63\], expected \[64\] or one number"),
    ],
)
def test_golden_sticks_offsets_of_another_shape(
    part: str, shape: tuple[int], says: str, tmp_path: Path
) -> None:
    others: dict[str, StoredTensor] = {}
    entries = []
    for name, one in {**open_ckpt(GOLDEN / "smooth.ckpt", others), **others}.items():
        values = array_of(one)
        found = values[: shape[0]] if name.endswith(part) else values
        entries.append(Entry(name, one.dtype, found.shape, partial(iter, [found])))
    write_ckpt_entries(tmp_path / "broken.ckpt", entries)
    with pytest.raises(ArtifactError, match=f"wk: not a matrix of Golden Stick: {says}"):
        tensors_at(tmp_path / "broken.ckpt")


def test_a_checkpoint_of_msmodelslim() -> None:
    folder = FIXTURES / "modelslim"
    found = tensors_at(folder)
    meant = np.load(folder / "meant.npz")
    assert len(found) == len(meant.files) == 7
    for tensor, values in found.items():
        name = tensor.split(".")[3]
        expected = meant[name]
        error = np.abs(values.float32() - expected).max()
        assert error <= 1e-7 * np.abs(expected).max(), name
        assert values.integers is not None


def described(folder: Path, **changes: Any) -> None:
    file = folder / "quant_model_description.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({f"{Q}.weight": "W8A8S"}, f"{Q}.weight: W8A8S) is not read yet"),
        ({f"{Q}.weight": "W4A4_FLATQUANT_DYNAMIC"}, "W4A4_FLATQUANT_DYNAMIC) is not read yet"),
        ({"metadata": {"quarot": {"heads": 1}}}, "metadata.quarot: inputs are rotated"),
        ({f"{Q}.weight": None}, f"{Q}: not a matrix of msModelSlim"),
        ({"model.norm.weight": "W8A8"}, "weight is described as W8A8, got F16"),
    ],
)
def test_other_types_are_refused_by_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, "modelslim W8A8_DYNAMIC")
    described(tmp_path, **changes)
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(tmp_path, MODEL)
    assert says in str(caught.value)


def test_numbers_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, "modelslim W8A8_DYNAMIC")
    file = tmp_path / "quant_model_weights.safetensors"
    content = file.read_bytes()
    at = content.index(f'"{Q}.weight_offset"'.encode())
    file.write_bytes(content[:at] + content[at:].replace(b"F32", b"U32", 1))
    with pytest.raises(ArtifactError, match=f"{Q}: not a matrix .*weight_offset is U32, expected"):
        open_checkpoint(tmp_path, MODEL)


def test_norms_with_a_bias_are_refused_by_name(tmp_path: Path) -> None:
    """As msmodelslim's anti-outlier leaves them."""
    write_folder(tmp_path, "modelslim W8A8")
    file = tmp_path / "quant_model_weights.safetensors"
    bias = "model.layers.0.input_layernorm.bias"
    save_file(load_file(file) | {bias: np.zeros(MODEL.hidden_size, np.float16)}, file)
    described(tmp_path, **{bias: "FLOAT"})
    with pytest.raises(ArtifactError, match=f"(?s){bias}.*anti-outlier gives norms a bias"):
        open_checkpoint(tmp_path, MODEL)


def test_shards_of_msmodelslim_have_an_index_of_another_name(tmp_path: Path) -> None:
    floats = write_folder(tmp_path, "modelslim W8A8")
    file = tmp_path / "quant_model_weights.safetensors"
    described_names = json.loads((tmp_path / "quant_model_description.json").read_text())
    shard = "quant_model_weights-00001-of-00001.safetensors"
    shutil.move(file, tmp_path / shard)
    index = {"weight_map": {name: shard for name in described_names if "." in name}}
    (tmp_path / f"{file.name}.index.json").write_text(json.dumps(index))
    found = open_checkpoint(tmp_path, MODEL)
    for name, meant in floats.items():
        np.testing.assert_allclose(found[name].float32(), meant, rtol=1e-6)
