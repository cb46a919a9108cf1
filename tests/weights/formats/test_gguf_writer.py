"""GGUF files that are written: read back, by us and by the gguf package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest

from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.training.kernels import searched
from lite_runner.weights.formats.gguf_checkpoint import config_of_gguf, from_gguf
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.formats.gguf_writer import GGUFKind, check_writable, gguf_bytes, write_gguf
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from tests.weights.conftest import CONFIGS

WRITTEN = ("llama", "qwen2", "gpt2", "bloom", "qwen3")


def tokens(model: Decoder) -> dict[str, int]:
    ids = {"bos": model.bos_token_id, "eos": model.eos_token_id[0], "padding": model.pad_token_id}
    return {f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items() if id is not None}


@pytest.mark.parametrize("kind", get_args(GGUFKind))
@pytest.mark.parametrize("family", WRITTEN)
def test_a_written_file_is_read_back(family: str, kind: GGUFKind, tmp_path: Path) -> None:
    model = CONFIGS[family]
    if family == "qwen3":  # llama.cpp's has no biases, and no windows
        block = replace(
            model.blocks[0],
            attention=replace(model.attention, qkv_bias=False, out_bias=False, window=None),
        )
        model = replace(model, blocks=(block,) * 2)
    check_writable(model, kind)
    source, path, done = random_checkpoint(model, 0), tmp_path / "x.gguf", []
    size = write_gguf(path, source, model, kind, tokens(model), done.append, search=searched)
    assert size == gguf_bytes(model, kind) and sum(done) == len(source)
    file = open_gguf(path)
    assert config_of_gguf(file) == model
    # Rows of 32 values are no whole blocks of Q4_K, and in Q4_K_M of Q5_0 and Q8_0.
    largest = {"Q8_0": 0.01, "Q4_0": 0.15, "Q4_1": 0.15, "Q4_K_M": 0.1}[kind]
    for name, found in from_gguf(file, model).items():
        expected = source[name].float32()
        assert np.abs(found.float32() - expected).max() <= largest * np.abs(expected).max(), name
    for one in gguf.GGUFReader(path).tensors:
        theirs = gguf.quants.dequantize(one.data, one.tensor_type)
        ours = file.tensors[one.name].lazy().float32()
        np.testing.assert_array_equal(ours, theirs.reshape(ours.shape), one.name)


def test_blocks_of_256_values_are_mixed_as_llama_cpp_does(tmp_path: Path) -> None:
    model = CONFIGS["llama"]
    wide = replace(model.blocks[0].feed_forward, width=256)
    model = replace(model, blocks=(replace(model.blocks[0], feed_forward=wide),) * 8)
    source, path = random_checkpoint(model, 0), tmp_path / "x.gguf"
    write_gguf(path, source, model, "Q4_K_M", tokens(model), search=searched)
    file = open_gguf(path)
    found = [file.tensors[f"blk.{layer}.ffn_down.weight"].type_name for layer in range(8)]
    assert found == [("Q6_K" if layer in (0, 3, 6, 7) else "Q4_K") for layer in range(8)]
    assert file.tensors["blk.1.attn_q.weight"].type_name == "Q5_0"
    assert file.tensors["output.weight"].type_name == "Q8_0"


def test_integers_and_blocks_are_written_unchanged(tmp_path: Path) -> None:
    model = CONFIGS["llama"]
    first, second = tmp_path / "1.gguf", tmp_path / "2.gguf"
    quantized = with_quantization(random_checkpoint(model, 0), model, Quantization("a16w4", 32))
    write_gguf(first, quantized, model, "Q4_1", tokens(model), search=searched)
    read = from_gguf(open_gguf(first), model)
    for name, one in quantized.items():
        np.testing.assert_array_equal(read[name].float32(), one.float32(), name)
    kept = with_quantization(read, model, Quantization("a16"))
    write_gguf(second, kept, model, "Q4_1", tokens(model), search=searched)
    assert second.read_bytes() == first.read_bytes()
    # Of another type they are made anew.
    write_gguf(second, kept, model, "Q8_0", tokens(model), search=searched)
    for name, one in from_gguf(open_gguf(second), model).items():
        expected = read[name].float32()
        assert np.abs(one.float32() - expected).max() <= 0.01 * np.abs(expected).max(), name


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    model = CONFIGS["llama"].with_rope_scaling(RopeScaling("llama3", 8.0, 8192))
    check_writable(model, "Q8_0")
    source, path = random_checkpoint(model, 0), tmp_path / "x.gguf"
    write_gguf(path, source, model, "Q8_0", tokens(model), search=searched)
    assert config_of_gguf(open_gguf(path)) == model


@pytest.mark.filterwarnings("error")
def test_a_model_of_more_than_256_tensors() -> None:
    model = CONFIGS["llama"]
    check_writable(replace(model, blocks=model.blocks[:1] * 30), "Q8_0")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    model, path = CONFIGS["llama"], tmp_path / "x.gguf"
    path.mkdir()
    with pytest.raises(EnvironmentFault, match=r"x\.gguf: cannot be written: Is a directory"):
        write_gguf(path, random_checkpoint(model, 0), model, "Q8_0", {}, search=searched)
    assert [one.name for one in tmp_path.iterdir()] == ["x.gguf"]


def test_models_that_gguf_cannot_express_are_refused() -> None:
    with pytest.raises(ConfigError, match="GGUF file cannot express sliding_window"):
        check_writable(CONFIGS["qwen3"], "Q8_0")
