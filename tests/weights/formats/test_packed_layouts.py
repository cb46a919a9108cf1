"""Layouts of other tools: their descriptions, and refused ones by name, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.weights.formats.packed_layouts import described, layout_of
from tests.each import each
from tests.packed_folders import LAYOUTS, write_folder

COMPRESSED = {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}


@each(
    ("section", "name"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "GPTQ (4 bits, group 128)"),
        ({"quant_method": "gptq", "bits": 3, "group_size": -1}, "GPTQ (3 bits)"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "AWQ (4 bits, group 64)"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": COMPRESSED}},
            "compressed-tensors (4 bits, group 32)",
        ),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "FP8"),
        ({"load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes (4 bits)"),
        ({"quant_method": "\x1b[2J"}, "\\x1b[2J"),
        ({"bits": True, "group_size": "128"}, "a layout without a name"),
    ],
)
def test_a_layout_is_named_as_its_users_know_it(section: dict[str, Any], name: str) -> None:
    assert described(section) == name


def test_a_hostile_description_is_a_short_line() -> None:
    assert described({"quant_method": "\x1b[2J\n" + "x" * 9000}).isprintable()
    assert len(described({"quant_method": {"a": "b" * 9000}, "bits": 10**30})) < 60


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """The error of a folder refused before anything is loaded, with exit code 4 and a remedy."""
    assert main([f"model={folder}", "predict_data=hi"]) == 4
    *_, message, hint = capsys.readouterr().err.splitlines()
    assert hint.startswith("  -> ")
    return message


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"quant_method": "exl2", "bits": 4.25}, "EXL2"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "x"}, "x"),
        ({}, "a layout without a name"),
    ],
)
def test_a_layout_that_is_not_read_is_named(
    section: dict[str, Any], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, "awq")
    with_section(tmp_path, section)
    assert refused(capsys, tmp_path).endswith(f"the weights are packed: {name} is not read yet")


def with_section(folder: Path, section: object, file: str = "config.json") -> None:
    """Replace what describes the layout; `file`: elsewhere than in config.json."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("quantization_config", None)
    if file == "config.json":
        raw["quantization_config"] = section
    else:
        (folder / file).write_text(json.dumps(section))
    path.write_text(json.dumps(raw))


GPTQ = LAYOUTS["gptq 4 bits"][0]
PACKED = LAYOUTS["pack-quantized 4 bits"][0]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (7, "quantization_config: got 7, expected an object"),
        (GPTQ | {"bits": 0}, "bits: 0"),
        (GPTQ | {"bits": True}, "bits: True"),
        (GPTQ | {"bits": 10**30}, "bits: 1000"),
        (GPTQ | {"bits": [4]}, "bits: [4]"),
        (GPTQ | {"group_size": 0}, "group_size: 0"),
        (GPTQ | {"group_size": 10**30}, "group_size: 1000"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: True"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype: 'int64'"),
        (GPTQ | {"dynamic": {"+:.*v_proj": {"bits": 8}}}, "dynamic: {'+:.*v_proj'"),
        (GPTQ | {"dynamic": [1]}, "dynamic: [1]"),
        (GPTQ | {"rotation": "hadamard"}, "rotation is not known, and may change the weights"),
        (LAYOUTS["awq"][0] | {"version": "gemv"}, "version: 'gemv'"),
        (LAYOUTS["awq"][0] | {"bits": 8}, "bits: 8"),
        (PACKED | {"format": "marlin-24"}, "format: 'marlin-24'"),
        (PACKED | {"config_groups": [1]}, "config_groups: [1]"),
        (PACKED | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config: {'format'"),
        (PACKED | {"transform_config": {"a": 1}}, "transform_config: {'a': 1}"),
        (LAYOUTS["fp8 blocks"][0] | {"fmt": "e5m2"}, "fmt: 'e5m2'"),
        (LAYOUTS["fp8 blocks"][0] | {"weight_block_size": [0, 1]}, "weight_block_size: [0, 1]"),
    ],
)
def test_settings_that_are_not_read_are_named(
    section: object, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, "awq")
    with_section(tmp_path, section)
    assert says in refused(capsys, tmp_path)


def test_blocks_may_be_one_row_high() -> None:
    section = LAYOUTS["fp8 blocks"][0] | {"weight_block_size": [1, 128]}
    assert layout_of(section, "config.json").block == (1, 128)


@pytest.mark.parametrize(
    ("name", "file"), [("gptq 4 bits", "quantize_config.json"), ("awq", "quant_config.json")]
)
def test_files_of_older_tools_describe_it_too(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, name)
    section = {key: value for key, value in LAYOUTS[name][0].items() if key != "quant_method"}
    with_section(tmp_path, section, file)
    assert main([f"model={tmp_path}", "dry_run=true", "predict_data=hi"]) == 0
    assert LAYOUT_NAMES[name] in capsys.readouterr().out
    with_section(tmp_path, section | {"bits": 5}, file)
    assert "bits: 5" in refused(capsys, tmp_path)


LAYOUT_NAMES = {"gptq 4 bits": "GPTQ (4 bits, group 32)", "awq": "AWQ (4 bits, group 32)"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_tell_the_layout_where_nothing_describes_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folder(tmp_path, name)
    if "modelslim" in name:  # without their description the tensors are no layout's
        (tmp_path / "quant_model_description.json").unlink()
        refused(capsys, tmp_path)
        return
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if "gptq" in name:  # nothing says which of two ways zero points are stored
        assert "the tensors of GPTQ, and no file says" in refused(capsys, tmp_path)
    elif name == "fp8 blocks":  # of 32, which are no usual size
        assert "weight_scale_inv is [2, 2] for a matrix [64, 64]" in refused(capsys, tmp_path)
    else:
        assert main([f"model={tmp_path}", "dry_run=true", "predict_data=hi"]) == 0


def test_other_integers_are_no_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, "awq")
    path = tmp_path / "model.safetensors"
    for known, odd in (
        (b".qweight", b".qwheigt"),
        (b".qzeros", b".qzores"),
        (b".scales", b".slaces"),
    ):
        path.write_bytes(path.read_bytes().replace(known, odd))
    assert "is I32, expected one of F32, F16, BF16" in refused(capsys, tmp_path)
