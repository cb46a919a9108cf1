from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from lite_runner.architectures import parameters
from lite_runner.architectures.naming import Role
from lite_runner.architectures.quantization import Quantization, schemes
from lite_runner.architectures.reference import Weights, capped, forward, norm
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights import LazyTensor
from lite_runner.weights.checkpoint import model_config_of
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.calibration import Layer
from lite_runner.weights.quantization.gptq import (
    Feedback,
    KeptLayers,
    Method,
    calibrated,
    gptq,
    working_bytes,
)
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.quantization.quantized import quantize, quantize_around_zero
from tests.packed_folders import MODEL
from tests.paths import REFERENCE
from tests.sizes import resized

TEXTS = np.random.default_rng(0).integers(0, 90, (6, 24)).astype(np.int32)


def correlated(count: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    mixing = rng.standard_normal((8, columns)) + 0.3 * rng.standard_normal((8, columns))
    inputs = rng.standard_normal((count, 8)) @ mixing + 0.2 * rng.standard_normal((count, columns))
    return np.asarray(inputs * np.linspace(0.2, 2, columns), np.float32)


@pytest.mark.parametrize("minimums", [True, False])
def test_outputs_are_closer_than_those_of_the_nearest_integers(minimums: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((48, 192)).astype(np.float32)
    inputs = correlated(512, 192)
    nearest = quantize(weight, 4, 64) if minimums else quantize_around_zero(weight, 64)
    found = gptq(weight, Feedback.of((inputs.T @ inputs).astype(np.float64)), nearest)
    errors = [np.square(inputs @ (one.float32() - weight).T).mean() for one in (found, nearest)]
    assert errors[0] < 0.4 * errors[1]
    assert found.scales is not None and np.array_equal(found.scales, nearest.scales)


@pytest.mark.parametrize("gram", [np.zeros((64, 64)), np.diag(np.arange(1.0, 65))])
def test_inputs_that_tell_nothing_of_one_another(gram: np.ndarray) -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    nearest = quantize(weight, 4, 32)
    np.testing.assert_array_equal(gptq(weight, Feedback.of(gram), nearest).values, nearest.values)


def test_an_input_that_is_never_used() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    inputs = correlated(100, 64)
    inputs[:, 5] = 0
    found = gptq(
        weight, Feedback.of((inputs.T @ inputs).astype(np.float64)), quantize(weight, 4, 32)
    )
    assert found.sound and np.isfinite(found.float32()).all()


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "mixtral", "gemma2", "granite"])
def test_layers_one_after_the_other_are_the_model(case: str) -> None:
    model = model_config_of(REFERENCE / case)
    assert model is not None
    tensors, state = random_checkpoint(model, 0), None
    for index, block in enumerate(model.blocks):
        own = {one: tensors[one.name] for one in parameters(model) if one.layer == index}
        state = Layer(model, block, own, tensors).run(TEXTS[0], state)
    arrays = {name: one.read() for name, one in tensors.items()}
    weights = Weights(model, arrays)
    head: Role = "embedding" if model.tie_word_embeddings else "head"
    assert state is not None
    logits = norm(model.norm, state, weights, "norm") @ weights[head, None, "weight"].T
    logits = capped(logits / model.logits_scaling, model.logits_softcap)
    expected = forward(model, arrays, TEXTS[0])
    assert abs(logits - expected).max() <= 1e-3 * abs(expected).max()


@pytest.mark.parametrize("case", ["llama", "gpt2", "mixtral"])
def test_a_calibrated_model(case: str, configs: Mapping[str, Decoder]) -> None:
    model = configs.get(case) or model_config_of(REFERENCE / case)
    quantization = Quantization("a16w4", 32)
    assert model is not None
    tensors, layers = random_checkpoint(model, 0), []
    held = calibrated(
        tensors, model, quantization, TEXTS % 40, around_zero=False, advance=layers.append
    )
    assert len(layers) == model.num_layers and held.keys() == tensors.keys()
    found = with_quantization(held, model, quantization)
    linear = {one.name for one in parameters(model) if one.is_linear}
    for name, scheme in schemes(model, quantization).items():
        integers = found[name].integers
        assert integers is not None and integers.scheme == scheme
        assert integers.stored == (name in linear)
        if name in linear:
            assert found[name].shape == tensors[name].shape
            np.testing.assert_array_equal(found[name].float32(), held[name].float32())
            difference = np.abs(found[name].float32() - tensors[name].float32())
            assert 0 < difference.max() < 0.5 * np.abs(tensors[name].float32()).max()


@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_memory_is_close_to_the_estimate(method: Method) -> None:
    # Of the others the smaller model's part is the same; awq's arrays of a group weigh more there.
    hidden = 512 if method == "awq" else 256
    model = resized(MODEL, hidden_size=hidden, intermediate_size=3 * hidden, num_layers=2)
    quant = Quantization("a8w8") if method == "smoothquant" else Quantization("a16w4", 32)
    tracemalloc.start()
    try:
        held = calibrated(
            random_checkpoint(model, 0), model, quant, TEXTS, method=method, around_zero=False
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    integers = sum(one.integers.read().nbytes for one in held.values() if one.integers)
    # NumPy's Cholesky factorization has a copy that is not traced.
    work = working_bytes(model, TEXTS.size, feedback=method == "gptq")
    assert 0.6 < peak / (integers + work) < 1


def test_integers_that_a_file_has_are_kept(configs: Mapping[str, Decoder]) -> None:
    model, quantization = configs["llama"], Quantization("a16w4", 32)
    stored = with_quantization(random_checkpoint(model, 0), model, quantization)
    held = calibrated(stored, model, quantization, TEXTS % 40, around_zero=False)
    for name in schemes(model, quantization):
        assert held[name] is stored[name]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_calibration_that_was_ended_goes_on_behind_its_layers(
    method: Method, tmp_path: Path
) -> None:
    tensors, quantization = random_checkpoint(MODEL, 0), Quantization("a16w4", 32)

    def run(kept: KeptLayers | None, most: int = 99) -> dict[str, LazyTensor]:
        layers: list[int] = []

        def advance(count: int) -> None:
            layers.append(count)
            if len(layers) == most:
                raise KeyboardInterrupt

        return calibrated(
            tensors,
            MODEL,
            quantization,
            TEXTS,
            method=method,
            around_zero=False,
            kept=kept,
            advance=advance,
        )

    folder = tmp_path / "q.partial"
    with pytest.raises(KeyboardInterrupt):
        run(KeptLayers(folder, "a"), most=1)
    again = KeptLayers(folder, "a")
    assert again.count == 1
    found, whole = run(again), run(None)
    for name, one in whole.items():
        np.testing.assert_array_equal(found[name].float32(), one.float32(), name)
    file = folder / "layer_0000.npz"
    with np.load(file) as held:
        arrays = dict(held)
    for last in {key.rpartition("|")[2]: key for key in arrays}.values():
        one = arrays[last]
        others = one[:-1], one[..., :-1], one.astype(np.float64 if one.dtype.kind == "f" else "S")
        for other in (None, *others):
            changed = {key: one for key, one in arrays.items() if key != last}
            np.savez(file, **(changed if other is None else changed | {last: other}))
            with pytest.raises(ArtifactError, match="not the layers of a calibration"):
                run(KeptLayers(folder, "a"))
    for content in (b"PK", b""):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match="not the layers of a calibration"):
            run(KeptLayers(folder, "a"))
    assert KeptLayers(folder, "b").count == 0


def test_a_folder_of_the_user_is_not_emptied(tmp_path: Path) -> None:
    folder = tmp_path / "q.partial"
    folder.mkdir()
    KeptLayers(folder, "a")  # an empty one will do
    (folder / "settings").write_bytes(b"\xff")  # cut off, or of another program
    KeptLayers(folder, "a")
    (folder / "settings").rename(folder / "notes.txt")
    with pytest.raises(ConfigError, match=r"q\.partial: .* other files") as caught:
        KeptLayers(folder, "a")
    assert "quantize_output=" in caught.value.hint
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]


def test_matrices_of_8_bits_are_measured_once(tmp_path: Path) -> None:
    names, folder = ("model.layers.0.w1",), tmp_path / "q.partial"
    assert KeptLayers(folder, "a").chosen(lambda: names) == names
    assert KeptLayers(folder, "a").chosen(lambda: pytest.fail("measured again")) == names
    (folder / "finer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"finer\.json is not a list of names"):
        KeptLayers(folder, "a").chosen(lambda: names)
