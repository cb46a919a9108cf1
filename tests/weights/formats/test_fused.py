"""Experts of a layer in one tensor, as transformers and MindFormers have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor, narrowed, widened
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.hugging_face import from_hugging_face, to_hugging_face
from lite_runner.weights.formats.safetensors_file import open_safetensors
from lite_runner.weights.write import convert, narrow
from tests.model_gguf import EXPERT, PROJECTIONS, Floats
from tests.references import REFERENCE

CASES = ["mixtral", "qwen3_moe", "qwen3_moe_step"]


def fused(folder: Path, target: Path) -> dict[str, Floats]:
    """Writes a model as transformers 5 has it in memory; returns the tensors."""
    tensors: dict[str, Floats] = {}
    every: dict[tuple[str, str], dict[int, Floats]] = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if found := EXPERT.fullmatch(name):
            every.setdefault((found[1], PROJECTIONS[found[3]]), {})[int(found[2])] = values
        else:
            tensors[name.replace("block_sparse_moe", "mlp")] = values
    stacks = {key: np.stack([each[at] for at in sorted(each)]) for key, each in every.items()}
    for layer in {layer for layer, _ in stacks}:
        name = f"model.layers.{layer}.mlp.experts"
        gate_up = [stacks[layer, "gate"], stacks[layer, "up"]]
        tensors[f"{name}.gate_up_proj"] = np.concatenate(gate_up, axis=1)
        tensors[f"{name}.down_proj"] = stacks[layer, "down"]
    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_fused_as_transformers_has_them(case: str, tmp_path: Path) -> None:
    fused(REFERENCE / case, tmp_path / "fused")
    model = model_config_of(tmp_path / "fused")
    assert model is not None
    expected = open_checkpoint(REFERENCE / case, model)
    found = open_checkpoint(tmp_path / "fused", model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.read(), expected[name].read(), name)


def test_fused_in_another_order_of_axes(tmp_path: Path) -> None:
    tensors = fused(REFERENCE / "qwen3_moe_step", tmp_path / "fused")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
    save_file(tensors, tmp_path / "fused/model.safetensors")
    model = model_config_of(tmp_path / "fused")
    assert model is not None
    with pytest.raises(ArtifactError, match=r"got \[7, 33, 20\], expected \[7, 20, 33\]"):
        open_checkpoint(tmp_path / "fused", model)


@pytest.mark.parametrize("case", CASES)
def test_stacked_as_mindformers_has_them(case: str, tmp_path: Path) -> None:
    model = model_config_of(REFERENCE / case)
    assert model is not None and model.sparse is not None and model.sparse.experts is not None
    convert(REFERENCE / case, model, tmp_path / "x.safetensors", "safetensors")
    shape = (model.sparse.experts.count, model.sparse.width, model.hidden_size)
    inner = "ffn" if case == "mixtral" else "routed_experts.ffn"
    stored = open_safetensors(tmp_path / "x.safetensors")
    assert stored[f"model.layers.1.feed_forward.{inner}.w1.weight"].shape == shape
    expected = open_checkpoint(REFERENCE / case, model)
    found = open_checkpoint(tmp_path / "x.safetensors", model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        whole = expected[name].read()
        np.testing.assert_array_equal(tensor.read(), whole, name)
        part = (slice(1, 3),) * whole.ndim
        np.testing.assert_array_equal(tensor.piece(part), whole[part], name)


def test_experts_of_different_types_are_fused_as_float32() -> None:
    """A zero bias fits into 16 bits where the others do not, as in a converted GGUF."""
    model = model_config_of(REFERENCE / "gpt_oss")
    assert model is not None
    tensors = dict(open_checkpoint(REFERENCE / "gpt_oss", model))
    for name, tensor in tensors.items():
        values = tensor.float32()
        if values.ndim > 1:
            values = widened(narrowed(values, "BF16"))
        elif name.endswith("ffn.0.w1.bias"):
            values = np.zeros_like(values)
        dtype = "BF16" if values.ndim > 1 else "F32"
        held = narrowed(values, dtype)
        tensors[name] = LazyTensor(tensor.shape, dtype, lambda held=held: held)
    mixed = narrow(tensors)
    assert len({tensor.dtype for name, tensor in mixed.items() if name.endswith("w1.bias")}) == 2
    found = from_hugging_face(to_hugging_face(mixed, model), model, "x")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name].float32(), tensor.float32(), name)
