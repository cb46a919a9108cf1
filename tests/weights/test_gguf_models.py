"""Whole models as GGUF files, against transformers' logits and the gguf library's numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lite_runner.architectures import parameters
from lite_runner.architectures.llama_like import changed
from lite_runner.architectures.reference import forward
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.training.kernels import searched
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from lite_runner.weights.formats.gguf_checkpoint import config_of_gguf, from_gguf
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.formats.gguf_writer import check_writable, write_gguf
from lite_runner.weights.lora.adapter import merged, merged_model, pool_size
from lite_runner.weights.lora.adapter_reader import open_adapters
from lite_runner.weights.read_ahead import QuantizedWeights
from tests import model_gguf, references
from tests.model_gguf import KINDS, write_model_gguf
from tests.newer_gguf import WITHOUT_TRANSFORMERS, write_newer_gguf, write_random_folder
from tests.paths import FIXTURES

# A scaling of other kinds than LongRoPE is not the same in a GGUF file.
CASES = (
    *("llama", "llama_biases", "llama_tied_mha", "mistral", "mistral_long"),
    *("qwen2", "qwen3", "qwen3_tied", "olmo2", "olmo2_tied", "granite", "granite_biases"),
    *("smollm3", "gemma2", "gemma3", "phi3"),
    *("phi3_partial", "phi3_long", "phi3_longrope"),
    *("chatglm", "glm", "glm4", "glm4_biases"),
    *("qwen3_moe", "mixtral"),
    *("starcoder2", "gpt_neox"),
)
NEWER = (
    *("bloom", "gpt2_inner", "mpt"),
    *("cohere", "cohere_normed", "cohere2", "ernie4_5", "exaone4", "exaone4_whole"),
    *("deepseek_v2", "deepseek_v3", "falcon", "falcon_new", "gemma", "glm4_moe"),
    *("glm4_moe_whole", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoehybrid_dense"),
    *("gemma4_moe", "gemma4_sides", "llama4", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    *(
        "hunyuan",
        "hunyuan_moe",
        "nemotron",
        "nemotron_h",
        "nemotron_h_moe",
        "olmo3",
        "olmoe",
        "phi",
        "qwen2_moe",
        "seed_oss",
    ),
    *("stablelm", "stablelm_normed", "stablelm_parallel"),
)
ERRORS = {"F32": 0.0, "Q8_0": 6e-3, "Q4_0": 0.12, "Q4_1": 0.08, "Q4_K": 0.08, "MXFP4": 0.25}


def window(case: str) -> dict[str, int]:
    """Metadata that llama.cpp's converter does not write: without it a Mistral reads as a Llama."""
    model = model_config_of(references.REFERENCE / case)
    if (window := model.attention.window) is None:
        return {}
    pattern = {"attention.sliding_window_pattern": 3} if case == "gemma3" else {}
    return {"attention.sliding_window": window} | pattern


def opened(path: Path, known: Any, *, rounded_input: bool) -> NativeBackend:
    """The file's model; `rounded_input`: with inputs of 8 bits."""
    file = open_gguf(path)
    config = config_of_gguf(file)
    options = NativeOptions(slots=len(known.prompts), length=known.length)
    weights = QuantizedWeights(from_gguf(file, config), config)
    return NativeBackend(config, pack(config, weights, rounded_input=rounded_input), options)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(
    case: str, reference: Callable[[str], Any], relative_error: Callable[..., float], tmp_path: Path
) -> None:
    known = reference(case)
    write_model_gguf(tmp_path / "x.gguf", known.folder, metadata=window(case))
    model = opened(tmp_path / "x.gguf", known, rounded_input=False)
    assert relative_error(known.run(model), known.logits) <= 1e-5


@pytest.mark.parametrize("case", NEWER)
def test_newer_families(
    case: str, reference: Callable[[str], Any], relative_error: Callable[..., float], tmp_path: Path
) -> None:
    known = reference(case)
    further = case in ("glm4_moe", "qwen3_next", "qwen3_5_text")
    write_newer_gguf(tmp_path / "x.gguf", known.folder, further=further)
    check_same(tmp_path / "x.gguf", known.folder)
    if case.startswith("deepseek"):  # as older converters wrote it
        write_newer_gguf(tmp_path / "y.gguf", known.folder, apart=False)
        check_same(tmp_path / "y.gguf", known.folder)
    # Files have no word for a clamp: 7, as of the published ones; nor for two mscales, nor a scale.
    if case in ("gpt_oss", "deepseek_v3", "llama4", "mpt"):
        return
    model = opened(tmp_path / "x.gguf", known, rounded_input=False)
    assert relative_error(known.run(model), known.logits) <= (
        2e-5 if known.config.recurrent else 1e-5
    )


@pytest.mark.parametrize(
    "case",
    [
        *("cohere_normed", "falcon_new", "glm4_moe", "qwen2_moe", "phi"),
        *("gemma4_moe", "gemma4_sides", "stablelm_normed"),
    ],
)
def test_newer_families_are_written(case: str, tmp_path: Path) -> None:
    folder = references.REFERENCE / case
    model = model_config_of(folder)
    source = open_checkpoint(folder, model)
    check_writable(model, "Q8_0")
    write_gguf(tmp_path / "x.gguf", source, model, "Q8_0", {}, search=searched)
    file = open_gguf(tmp_path / "x.gguf")
    for name, tensor in from_gguf(file, config_of_gguf(file)).items():
        found, given = tensor.float32(), source[name].float32()
        np.testing.assert_allclose(found, given, rtol=0, atol=ERRORS["Q8_0"], err_msg=name)


def test_key_heads_of_gemma4_are_written() -> None:
    """Layers with the whole context may have fewer, whether or not values are keys there."""
    folder = references.REFERENCE / "gemma4_sides"
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for one in raw["per_layer_config"].values():
        one["num_key_value_heads"] = 1
    for equal in (False, True):
        config = model_config_from_hf(raw | {"attention_k_eq_v": equal}, "config.json")
        written = json.loads(json.dumps(hf_from_model_config(config)))
        assert model_config_from_hf(written, "config.json") == config
        check_writable(config, "Q8_0")


@pytest.mark.parametrize("kind", WITHOUT_TRANSFORMERS)
def test_newer_families_that_transformers_has_no_code_of(kind: str, tmp_path: Path) -> None:
    write_random_folder(tmp_path, kind)
    for further in (False, True):
        write_newer_gguf(tmp_path / "x.gguf", tmp_path, further=further)
        check_same(tmp_path / "x.gguf", tmp_path)


def test_text_models_of_those_that_read_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case, name in (("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")):
        monkeypatch.setitem(model_gguf.ARCHITECTURES, case, name)
        metadata = {"n_deepstack_layers": 3}
        metadata |= {"expert_feed_forward_length": 32} if case == "qwen3_moe" else {}
        write_model_gguf(tmp_path / "x.gguf", references.REFERENCE / case, metadata=metadata)
        check_same(tmp_path / "x.gguf", references.REFERENCE / case)


def check_same(path: Path, folder: Path) -> None:
    """The model of a file is that of a folder, in its description and in its tensors."""
    file, expected = open_gguf(path), model_config_of(folder)
    config = config_of_gguf(file)
    if config.architecture == "gpt_oss":
        expected = changed(expected, feed_forward={"limit": 7.0})
    if config.architecture == "mpt":
        expected = changed(expected, {"scale": None})
    if config.architecture == "llama4_text":  # these are the published models', in every file
        expected = changed(expected, {"chunk": None, "temperature": None})
    if config.architecture == "deepseek_v3" and expected.rotary and expected.rotary.scaling:
        # A file has one word for mscale and mscale_all_dim, which are the same in published models.
        scaling = expected.rotary.scaling
        expected = expected.with_rope_scaling(replace(scaling, mscale=scaling.mscale_all_dim))
    assert config == expected
    theirs = open_checkpoint(folder, expected)
    for name, tensor in from_gguf(file, config).items():
        wanted = theirs[name].float32()
        if config.rotary is None and name.endswith(("wq.weight", "wk.weight")):
            continue  # in another order of rows, which without positions is the same to both
        if name.endswith("A_log"):  # files have its exponential
            np.testing.assert_allclose(tensor.float32(), wanted, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(tensor.float32(), wanted, name)


@pytest.mark.parametrize("kind", KINDS)
def test_means_what_the_library_says(kind: str, tmp_path: Path) -> None:
    for case in CASES:
        (tmp_path / case).mkdir()
        check_meant(case, kind, tmp_path / case)


def check_meant(case: str, kind: str, tmp_path: Path) -> None:
    meant = write_model_gguf(
        tmp_path / "x.gguf", references.REFERENCE / case, kind, metadata=window(case)
    )
    shutil.copy(references.REFERENCE / case / "config.json", tmp_path / "config.json")
    save_file(meant, tmp_path / "model.safetensors")
    file = open_gguf(tmp_path / "x.gguf")
    config = config_of_gguf(file)
    assert config == model_config_of(tmp_path / "model.safetensors")
    found = from_gguf(file, config)
    expected = open_checkpoint(tmp_path / "model.safetensors", config)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].float32(), tensor.float32(), f"{case}: {name}")


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_older_files_are_apart(kind: str, tmp_path: Path) -> None:
    folder = references.REFERENCE / "mixtral"
    sliding = window("mixtral")
    write_model_gguf(tmp_path / "together.gguf", folder, kind, sliding)
    write_model_gguf(tmp_path / "apart.gguf", folder, kind, sliding, apart=True)
    together, apart = (open_gguf(tmp_path / f"{name}.gguf") for name in ("together", "apart"))
    config = config_of_gguf(apart)
    assert len(apart.tensors) > len(together.tensors) and config == config_of_gguf(together)
    expected = from_gguf(together, config)
    for name, tensor in from_gguf(apart, config).items():
        np.testing.assert_array_equal(tensor.float32(), expected[name].float32(), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "rounded_input"),
    [
        *((case, False) for case in ("qwen3", "mistral", "qwen3_moe", "mixtral")),
        # With 8 bits a router may choose another expert.
        *((case, True) for case in ("qwen3", "mistral")),
    ],
)
def test_logits_are_those_of_the_floats_that_the_file_means(
    case: str,
    rounded_input: bool,
    kind: str,
    reference: Callable[[str], Any],
    relative_error: Callable[..., float],
    tmp_path: Path,
) -> None:
    known = reference(case)
    meant = write_model_gguf(tmp_path / "x.gguf", known.folder, kind, window(case))
    model = opened(tmp_path / "x.gguf", known, rounded_input=rounded_input)
    config = known.config
    floats = {one.name: meant[one.hugging_face] for one in parameters(config)}
    expected = []
    for prompt, forced in zip(known.prompts, known.forced, strict=True):
        logits = forward(config, floats, np.concatenate([prompt, forced]))
        expected.append(logits[len(prompt) - 1 :])
    error = relative_error(known.run(model), np.stack(expected))
    coarser = 256 if rounded_input else 1  # than 16 bits
    assert error <= coarser * 5e-4
    assert not rounded_input or kind in ("F32", "MXFP4") or error > 5e-4  # they were rounded


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_rows_of_8_bits_do_not_depend_on_others(
    case: str, kind: str, reference: Callable[[str], Any], tmp_path: Path
) -> None:
    known = reference(case)
    write_model_gguf(tmp_path / "x.gguf", known.folder, kind, window(case))
    model = opened(tmp_path / "x.gguf", known, rounded_input=True)
    together = known.run(model)
    for row, (prompt, forced) in enumerate(zip(known.prompts, known.forced, strict=True)):
        tokens = np.concatenate([prompt, forced])
        for position in range(len(tokens)):  # one token at a time
            logits = model.forward([Row(0, tokens[position : position + 1], position)])
            if position >= len(prompt) - 1:
                expected = together[row, position - len(prompt) + 1]
                np.testing.assert_array_equal(logits[0], expected)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_adapters_beside_blocks_compute_as_merged_into_their_floats(
    case: str,
    kind: str,
    reference: Callable[[str], Any],
    relative_error: Callable[..., float],
    tmp_path: Path,
) -> None:
    known = reference(case)
    write_model_gguf(tmp_path / "x.gguf", known.folder, kind)
    file = open_gguf(tmp_path / "x.gguf")
    config = config_of_gguf(file)
    (adapter,) = open_adapters(FIXTURES / "adapters" / case / "all", config).values()
    options = NativeOptions(len(known.prompts), known.length, lora=pool_size([adapter], 1))
    weights = QuantizedWeights(from_gguf(file, config), config)
    layers = pack(config, weights, options.lora)
    model = NativeBackend(config, layers, options, [adapter])
    slot = model.adapters.pin(adapter.name)
    rows = [Row(index, prompt, 0, slot) for index, prompt in enumerate(known.prompts)]
    floats = {
        name: tensor.float32()
        for name, tensor in merged(from_gguf(file, config), adapter, config).items()
    }
    with_adapter = merged_model(config, adapter)
    expected = [forward(with_adapter, floats, prompt)[-1] for prompt in known.prompts]
    found = model.forward(rows)
    assert relative_error(found, np.stack(expected)) <= 1e-3  # the adapter grows what is rounded
    base = model.forward([Row(row.slot, row.tokens, 0) for row in rows])
    assert relative_error(base, found) > 1e-2


def test_a_mistral_without_its_window_is_a_llama(tmp_path: Path) -> None:
    write_model_gguf(tmp_path / "x.gguf", references.REFERENCE / "mistral")
    found = config_of_gguf(open_gguf(tmp_path / "x.gguf"))
    assert (found.architecture, set(found.windows)) == ("llama", {None})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["qwen3", "mistral"])
def test_files_hold_the_quantized_type(case: str, kind: str, tmp_path: Path) -> None:
    folder = references.REFERENCE / case
    meant = write_model_gguf(tmp_path / "x.gguf", folder, kind)
    assert kind in {one.type_name for one in open_gguf(tmp_path / "x.gguf").tensors.values()}
    for name, values in load_file(folder / "model.safetensors").items():
        np.testing.assert_allclose(meant[name], values, rtol=0, atol=ERRORS[kind])
