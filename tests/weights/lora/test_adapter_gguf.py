"""LoRA as GGUF: there and back, read by the gguf package, and refused ones."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_in
from lite_runner.weights.formats.gguf_checkpoint import from_gguf
from lite_runner.weights.formats.gguf_file import GGUFFile, GGUFHeader, GGUFTensor
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.adapter_gguf import open_lora_gguf, write_lora_gguf
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.lora.adapter_writer import write_adapters
from tests.paths import FIXTURES

FAMILIES = ("llama", "bloom", "gpt2", "gpt_neox", "qwen3", "gemma2", "starcoder2", "phi3")


def opened(name: str) -> tuple[dict[str, Adapter], Decoder]:
    model = model_config_in(FIXTURES / "reference" / name)
    assert model is not None
    return open_adapters(FIXTURES / "adapters" / name, model), model


def plain(adapters: dict[str, Adapter], model: Decoder) -> dict[str, Adapter]:
    """Those whose modules a GGUF file has: no tied head."""
    names = {one.name for one in parameters(model)}
    return {name: one for name, one in adapters.items() if {*one.pairs} <= names}


def as_llama_cpp_adds(path: Path, model: Decoder) -> dict[str, NDArray[np.float32]]:
    """The values that the file adds to each tensor, computed with the gguf package alone."""
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    tensors = {one.name: np.array(one.data) for one in reader.tensors}
    assert all(one.tensor_type == gguf.GGMLQuantizationType.F32 for one in reader.tensors)
    found = {}
    for name in {name.rpartition(".lora_")[0] for name in tensors}:
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        scale = np.float32(fields["adapter.lora.alpha"] / b.shape[1])
        # Rows of the embedding are its inputs.
        found[name] = scale * (a @ b.T if name == "token_embd.weight" else b @ a)
    return found


def canonical(deltas: dict[str, NDArray[np.float32]], model: Decoder) -> dict[str, Any]:
    """A model's file of these tensors and zeros, read as one."""
    shapes: dict[str, tuple[int, ...]] = {}
    for one in parameters(model):
        rows, *rest = one.shape[::-1] if one.transposed else one.shape
        shapes[one.gguf] = (shapes.get(one.gguf, (0,))[0] + rows, *rest)
    tensors = {}
    for name, shape in shapes.items():
        values = deltas.get(name, np.zeros(shape, np.float32))
        assert values.shape == shape
        tensors[name] = GGUFTensor(shape, "F32", values.reshape(-1).view(np.uint8))
    words = architecture_of(model).gguf
    assert words is not None
    metadata = {"general.architecture": words.name or model.architecture}
    header = GGUFHeader(Path("x.gguf"), mmap.mmap(-1, 1), metadata, (), 0)
    return from_gguf(GGUFFile(header, tensors), model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_adapter_adds_the_same_and_is_read_back(family: str, tmp_path: Path) -> None:
    adapters, model = opened(family)
    adapters = plain(adapters, model)
    turned = {one.name for one in parameters(model) if one.transposed or one.role == "embedding"}
    assert adapters
    for key, adapter in adapters.items():
        path = tmp_path / f"{key}.gguf"
        write_lora_gguf(adapter, model, path)
        for name, found in canonical(as_llama_cpp_adds(path, model), model).items():
            expected = np.zeros(found.shape, np.float32)
            if (pair := adapter.pairs.get(name)) is not None:
                a, b = pair.values()
                expected = (b @ a).T if name in turned else b @ a
            np.testing.assert_allclose(found.float32(), expected, rtol=1e-5, atol=1e-7)
        again = open_lora_gguf(key, path, model)
        assert list(again.pairs) == list(adapter.pairs)
        alike = len({(pair.scale, pair.rank) for pair in adapter.pairs.values()}) == 1
        for name, pair in adapter.pairs.items():
            (a, b), (own_a, own_b) = again.pairs[name].values(), pair.values()
            np.testing.assert_array_equal(a, own_a)
            np.testing.assert_allclose(b, own_b, rtol=0 if alike else 1e-6)


def test_parts_with_an_a_of_their_own(tmp_path: Path) -> None:
    """Of a fused tensor some parts are targeted, each of another rank and scale."""
    _, model = opened("bloom")
    draw = np.random.default_rng(0).standard_normal
    names = [one.name for one in parameters(model) if one.role in ("query", "value")]
    names = [name for name in names if name.endswith("weight")][:2]

    def lazy(*shape: int) -> LazyTensor:
        values = draw(shape, np.float32)
        return LazyTensor(shape, "F32", lambda: values)

    width = model.hidden_size
    pairs = {
        name: LoraPair(lazy(rank, width), lazy(width, rank), scale)
        for name, rank, scale in zip(names, (2, 3), (0.5, 2.0), strict=True)
    }
    write_lora_gguf(Adapter("x", Path(), pairs), model, tmp_path / "x.gguf")
    again = open_lora_gguf("x", tmp_path / "x.gguf", model)
    for name, pair in again.pairs.items():
        a, b = pair.values()
        expected = np.zeros((width, width), np.float32)
        if name in pairs:
            own_a, own_b = pairs[name].values()
            expected = own_b @ own_a
        np.testing.assert_allclose(b @ a, expected, rtol=1e-4, atol=1e-6)


def test_a_listing_of_files(tmp_path: Path) -> None:
    adapters, model = opened("llama")
    adapters = plain(adapters, model)
    write_adapters(adapters, model, tmp_path / "all", "gguf", listed=True)
    again = open_adapters(tmp_path / "all", model, root=tmp_path)
    assert list(again) == list(adapters)
    (only,) = open_adapters(tmp_path / "all" / f"{next(iter(adapters))}.gguf", model)
    assert only == next(iter(adapters))


@pytest.mark.parametrize(
    ("family", "roles"),
    [
        ("granitemoehybrid", {"recurrent_in", "recurrent_gate", "recurrent_decay"}),
        ("qwen3_next", {"recurrent_beta", "recurrent_decay"}),
        ("qwen3_5_text", {"recurrent_out"}),
    ],
)
def test_matrices_that_files_have_in_another_order(
    family: str, roles: set[str], tmp_path: Path
) -> None:
    """Their rows among others', or their columns, are not in A and B alone."""
    model = model_config_in(FIXTURES / "reference" / family)
    assert model is not None
    matrices = [one for one in parameters(model) if one.role in roles and one.kind == "weight"]
    assert {one.role for one in matrices} == roles
    for one in matrices:
        outputs, inputs = one.shape
        a, b = np.ones((2, inputs), np.float32), np.ones((outputs, 2), np.float32)
        pair = LoraPair(LazyTensor(a.shape, "F32", a.copy), LazyTensor(b.shape, "F32", b.copy), 1.0)
        path = tmp_path / "x.gguf"
        with pytest.raises(ArtifactError, match=f"{one.name}: llama.cpp has no such tensor"):
            write_lora_gguf(Adapter("x", Path(), {one.name: pair}), model, path)
        architecture = architecture_of(model).gguf
        assert architecture is not None
        writer = gguf.GGUFWriter(path, architecture.name)
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_tensor(f"{one.gguf}.lora_a", a)
        writer.add_tensor(f"{one.gguf}.lora_b", b)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ArtifactError, match=f"{one.gguf}: the model has no such matrix"):
            open_lora_gguf("x", path, model)


def test_where_a_file_is_written(tmp_path: Path) -> None:
    adapters, model = opened("llama")
    adapter = next(iter(plain(adapters, model).values()))
    write_lora_gguf(adapter, model, tmp_path / "new/folder/x.gguf")
    assert open_lora_gguf("x", tmp_path / "new/folder/x.gguf", model).pairs.keys()
    (tmp_path / "y.gguf").mkdir()
    with pytest.raises(EnvironmentFault, match=r"y\.gguf: cannot be written: Is a directory"):
        write_lora_gguf(adapter, model, tmp_path / "y.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"new", "y.gguf"}


def test_refused_input(tmp_path: Path) -> None:
    adapters, model = opened("llama")
    adapter = next(iter(plain(adapters, model).values()))
    path = tmp_path / "x.gguf"
    write_lora_gguf(adapter, model, path)
    other = replace(model, hidden_size=2 * model.hidden_size)
    with pytest.raises(ArtifactError, match=r"lora_a is \[.*\] and lora_b \[.*\], expected"):
        open_lora_gguf("x", path, other)
    _, qwen = opened("qwen3")
    with pytest.raises(ArtifactError, match=r"general.architecture is 'llama', expected 'qwen3'"):
        open_lora_gguf("x", path, qwen)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(8, np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((2, 8), np.float32))
    writer.add_tensor("blk.9.attn_q.weight.lora_a", np.zeros((2, 8), np.float32))
    writer.add_tensor("blk.9.attn_q.weight.lora_b", np.zeros((8, 2), np.float32))
    width = model.hidden_size
    writer.add_tensor("blk.1.attn_q.weight.lora_a", np.zeros((0, width), np.float32))
    writer.add_tensor("blk.1.attn_q.weight.lora_b", np.zeros((width, 0), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ArtifactError) as caught:
        open_lora_gguf("x", path, model)
    assert "blk.0.attn_norm.weight: not a tensor of plain LoRA" in str(caught.value)
    assert "blk.0.attn_q.weight: has no lora_b" in str(caught.value)
    assert f"lora_a is [0, {width}] and lora_b [{width}, 0], expected a rank" in str(caught.value)
    assert "blk.9.attn_q.weight: the model has no such matrix" in str(caught.value)
    glm = opened("glm")[1]
    with pytest.raises(ArtifactError, match=r"glm: llama\.cpp has no such family"):
        write_lora_gguf(adapter, glm, path)
    (tmp_path / "y.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match="not a valid GGUF file"):
        open_adapters(tmp_path / "y.gguf", model)
