"""A merged model computes what peft computes with the adapter (tests/fixtures/adapters)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Row
from lite_runner.backends.mindspore import MindSporeBackend, MindSporeOptions
from lite_runner.backends.native import NativeOptions
from lite_runner.backends.native_compiled import open_compiled
from lite_runner.errors import ArtifactError
from lite_runner.native.lora_pool import LoraSize
from lite_runner.weights.checkpoint import model_config_in, open_checkpoint
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.lora.adapter_write import write_adapters
from lite_runner.weights.lora.merge import merged, merged_model
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.tensor import LazyTensor
from tests.paths import FIXTURES

TOLERANCE = 1e-4  # of the largest logit, as of the base models against transformers


def parts(name: str, adapter: str) -> tuple[Decoder, dict[str, LazyTensor], Adapter]:
    model = model_config_in(FIXTURES / "reference" / name)
    assert model is not None
    base = open_checkpoint(FIXTURES / "reference" / name, model)
    return model, base, open_adapters(FIXTURES / "adapters" / name, model)[adapter]


@pytest.mark.parametrize(
    ("name", "index", "adapter"),
    [
        ("llama", 3, "patterns"),
        ("llama", 5, "ends"),
        ("qwen2", 3, "embedding"),  # the head was tied to it
        ("qwen2", 4, "head"),
        ("bloom", 1, "all"),
        ("gpt2", 1, "all"),
    ],
)
def test_logits_equal_pefts(name: str, index: int, adapter: str) -> None:
    model, base, opened = parts(name, adapter)
    expected = np.load(FIXTURES / "adapters" / name / "expected.npz")
    weights = ReadAhead(merged(base, opened, model))
    options = MindSporeOptions(slots=len(expected["prompts"]), length=11)
    backend = MindSporeBackend(merged_model(model, opened), weights, options)
    steps = [expected["prompts"], *np.split(expected["continuations"], 2, axis=1)]
    logits, position = [], 0
    for tokens in steps:
        logits.append(backend.forward([Row(i, row, position) for i, row in enumerate(tokens)]))
        position += tokens.shape[1]
    wanted = expected["logits"][index]
    assert np.abs(np.stack(logits, axis=1) - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_only_the_adapters_weights_change_and_keep_their_type() -> None:
    model, base, adapter = parts("gpt2", "patterns")
    halves = {
        name: LazyTensor(tensor.shape, "F16", lambda t=tensor: t.float32().astype(np.float16))
        for name, tensor in base.items()
    }
    found = merged(halves, adapter, model)
    assert list(found) == list(base)
    for name, tensor in found.items():
        before, after = halves[name].read(), tensor.read()
        assert after.dtype == np.float16 and after.shape == before.shape
        assert (after.tobytes() != before.tobytes()) == (name in adapter.pairs)
        if name in adapter.pairs:  # held [in, out]
            pair = adapter.pairs[name]
            product = pair.b.read().astype(np.float64) @ pair.a.read().astype(np.float64)
            exact = before.astype(np.float64) + pair.scale * product.T
            np.testing.assert_allclose(after, exact, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (2.0**-9, 0x3F80),  # a quarter of the last place: down
        (2.0**-8, 0x3F80),  # half of it: to the even one, down
        (3 * 2.0**-8, 0x3F82),  # half of it: to the even one, up
        (3 * 2.0**-9, 0x3F81),
    ],
)
def test_bfloat16_is_rounded_to_the_nearest(added: float, expected: int) -> None:
    model, base, adapter = parts("llama", "all")
    name = "model.layers.0.attention.wq.weight"

    def constant(shape: tuple[int, int], value: float) -> LazyTensor:
        return LazyTensor(shape, "F32", lambda: np.full(shape, value, np.float32))

    ones = LazyTensor((64, 32), "BF16", lambda: np.full((64, 32), 0x3F80, np.uint16))
    pair = LoraPair(constant((1, 32), 1.0), constant((64, 1), added / 2), 2.0)
    found = merged(dict(base) | {name: ones}, replace(adapter, pairs={name: pair}), model)
    assert found[name].dtype == "BF16"
    assert set(found[name].read().ravel()) == {expected}


def test_what_cannot_be_merged() -> None:
    model, base, adapter = parts("bloom", "embedding")
    with pytest.raises(ArtifactError, match="bloom has one tensor for both, so it cannot be merg"):
        merged(base, adapter, model)
    model, base, adapter = parts("llama", "all")
    name, pair = next(iter(adapter.pairs.items()))
    broken = LazyTensor(pair.b.shape, "F32", lambda: np.full(pair.b.shape, np.nan, np.float32))
    adapter = replace(adapter, pairs={**adapter.pairs, name: replace(pair, b=broken)})
    with pytest.raises(ArtifactError, match=f"{name} merged with it has values that are no number"):
        merged(base, adapter, model)[name].read()


def test_an_adapter_of_fused_modules_changes_what_they_hold(tmp_path: Path) -> None:
    """Of ChatGLM-6B, for which peft has no class: against its files, merged as peft does, and as
    its own operators apply it."""
    folder = FIXTURES / "reference/chatglm_6b"
    model = model_config_in(folder)
    assert model is not None
    stored = {
        name: one.read() for name, one in open_safetensors(folder / "model.safetensors").items()
    }
    rng = np.random.default_rng(2)
    tensors, merged_file = {}, dict(stored)
    for layer in range(2):
        for module in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h"):
            name = f"transformer.layers.{layer}.{module}"
            weight = stored[f"{name}.weight"]
            a = rng.standard_normal((2, weight.shape[1])).astype(np.float32) / 8
            b = rng.standard_normal((weight.shape[0], 2)).astype(np.float32) / 8
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": a,
                f"base_model.model.{name}.lora_B.weight": b,
            }
            merged_file[f"{name}.weight"] = weight + 2 * (b @ a)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    targets = ["query_key_value", "dense", "dense_h_to_4h"]
    written = tmp_path / "tuned"
    written.mkdir()
    (written / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": targets}))
    write_safetensors(written / "adapter_model.safetensors", lazy(tensors), {"format": "pt"})
    adapter = open_adapters(written, model)["tuned"]

    write_safetensors(tmp_path / "model.safetensors", lazy(merged_file), {"format": "pt"})
    wanted = open_checkpoint(tmp_path / "model.safetensors", model)
    base = open_checkpoint(folder, model)
    for name, tensor in merged(base, adapter, model).items():
        np.testing.assert_allclose(tensor.read(), wanted[name].read(), rtol=1e-5, atol=1e-6)

    prompt = np.array([33, 5, 121, 7, 8, 124], np.int32)
    lora = LoraSize(1, 2, frozenset(adapter.pairs))
    options = NativeOptions(1, 48, lora=lora)
    tuned = open_compiled(model, QuantizedWeights(base, model), options, [adapter])
    plain = open_compiled(model, QuantizedWeights(wanted, model), NativeOptions(1, 48))
    assert tuned.adapters is not None
    slot = tuned.adapters.pin("tuned")
    found, expected = tuned.forward([Row(0, prompt, 0, slot)]), plain.forward([Row(0, prompt, 0)])
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.abs(tuned.forward([Row(0, prompt, 0)]) - expected).max() > 1e-2

    write_adapters({"tuned": adapter}, model, tmp_path / "mf", "mindformers", listed=False)
    again = open_adapters(tmp_path / "mf", model)
    for name, pair in next(iter(again.values())).pairs.items():
        assert np.array_equal(pair.b.read(), adapter.pairs[name].b.read())


def lazy(arrays: dict[str, NDArray[np.float32]]) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(array.shape, "F32", lambda array=array: array)
        for name, array in arrays.items()
    }
