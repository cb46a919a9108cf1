"""Checkpoints that other tools have packed: each is refused by its name, in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lite_runner.app import main
from lite_runner.weights.formats.safetensors_file import ITEM_BYTES
from lite_runner.weights.hf import described

LAYER = "model.layers.0.self_attn.q_proj"
COMPRESSED = {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}
MX = "model.layers.0.mlp.experts.gate_up_proj"
# The section, the name that is told; and the tensors of a matrix, by their types.
LAYOUTS: list[tuple[dict[str, Any], str, dict[str, str]]] = [
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        "GPTQ (4 bits, group 128)",
        {"qweight": "I32", "qzeros": "I32", "scales": "F16", "g_idx": "I32"},
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
        "AWQ (4 bits, group 64)",
        {"qweight": "I32", "qzeros": "I32", "scales": "F16"},
    ),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": COMPRESSED}},
        "compressed-tensors (4 bits, group 32)",
        {"weight_packed": "I32", "weight_scale": "BF16", "weight_shape": "I64"},
    ),
    (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        "FP8",
        {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
    ),
    ({"quant_method": "mxfp4"}, "MXFP4", {f"{MX}_blocks": "U8", f"{MX}_scales": "U8"}),
    (
        {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes (4 bits)",
        {"weight": "U8", "weight.absmax": "F32", "weight.quant_state.bitsandbytes__nf4": "U8"},
    ),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "bitsandbytes (8 bits)",
        {"weight": "I8", "SCB": "F32"},
    ),
]
IDS = [name for _, name, _ in LAYOUTS]


def packed(folder: Path, tensors: dict[str, str]) -> Path:
    """A safetensors file with such tensors of a matrix."""
    header, at = {}, 0
    for name, dtype in tensors.items():
        size = math.prod((8, 2)) * ITEM_BYTES[dtype]
        full = name if name.startswith("model.") else f"{LAYER}.{name}"
        header[full] = {"dtype": dtype, "shape": [8, 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is refused before anything is loaded, with exit code 4 and a remedy."""
    assert main([*words, "predict_data=hi"]) == 4
    message, hint = capsys.readouterr().err.splitlines()
    assert "quant=a16w4" in hint and "GGUF" in hint
    return message


@pytest.mark.parametrize(("section", "name", "tensors"), LAYOUTS, ids=IDS)
def test_a_described_layout_is_named(
    section: dict[str, Any],
    name: str,
    tensors: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packed(tmp_path, tensors)
    raw = {"model_type": "llama", "quantization_config": section}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for model in ("auto", "tiny_llama"):
        said = refused(capsys, f"model={model}", f"load_checkpoint={tmp_path}")
        assert said.endswith(f": the weights are packed: {name} is not read yet")


@pytest.mark.parametrize(("_", "name", "tensors"), LAYOUTS, ids=IDS)
def test_tensors_tell_the_layout_where_nothing_describes_it(
    _: object,
    name: str,
    tensors: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = packed(tmp_path, tensors)
    said = refused(capsys, "model=tiny_llama", f"load_checkpoint={path}")
    assert f"{path}: the weights are packed: " in said and name.partition(" ")[0] in said


@pytest.mark.parametrize(
    ("file", "raw", "name"),
    [
        ("quantize_config.json", {"bits": 3, "group_size": -1}, "GPTQ (3 bits)"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128}, "AWQ (4 bits, group 128)"),
        ("config.json", {"compression_config": {"quant_method": "x"}}, "x"),
        ("config.json", {"quantization_config": "?"}, "GPTQ or AWQ"),
        ("config.json", [], "GPTQ or AWQ"),
    ],
)
def test_files_of_older_tools_describe_it_too(
    file: str, raw: Any, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path, {"qweight": "I32", "qzeros": "I32", "scales": "F16"})
    (tmp_path / file).write_text(json.dumps(raw))
    said = refused(capsys, "model=tiny_llama", f"load_checkpoint={tmp_path}/model.safetensors")
    assert said.endswith(f"packed: {name} is not read yet")


def test_other_integers_are_no_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = packed(tmp_path, {"weight": "I32"})
    assert main(["model=tiny_llama", f"load_checkpoint={path}", "predict_data=hi"]) == 4
    assert (
        f"tensor {LAYER}.weight is I32, expected one of F32, F16, BF16" in capsys.readouterr().err
    )


def test_a_hostile_description_is_a_short_line() -> None:
    assert described({"quant_method": "\x1b[2J\n" + "x" * 9000}).isprintable()
    assert len(described({"quant_method": {"a": "b" * 9000}, "bits": 10**30})) < 60
    assert described({"bits": True, "group_size": "128"}) == "a layout without a name"
