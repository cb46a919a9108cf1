from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from lite_runner.architectures.spec import Decoder, RopeScaling
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.gguf_checkpoint import config_of_gguf, from_gguf, llama3_factors
from lite_runner.weights.formats.gguf_file import open_gguf
from lite_runner.weights.layouts import random_checkpoint
from tests.sizes import ModelConfig, resized

WriteGguf = Callable[..., Path]
ARCHITECTURES = ("llama", "qwen2", "gpt2", "bloom")
RECURRENT = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}


def arrays(config: Decoder) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in random_checkpoint(config, 0).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_config_and_tensors(
    architecture: str,
    configs: Mapping[str, Decoder],
    write_gguf: WriteGguf,
    same: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = configs[architecture]
    file = open_gguf(write_gguf(tmp_path / "x.gguf", config, architecture, arrays(config)))
    assert config_of_gguf(file) == config
    assert capsys.readouterr().err == ""
    same(from_gguf(file, config), random_checkpoint(config, 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_quantized(
    architecture: str, configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs[architecture]
    values = arrays(config)
    path = write_gguf(tmp_path / "x.gguf", config, architecture, values, kind="Q8_0")
    found = from_gguf(open_gguf(path), config)
    for name, array in values.items():
        # Quantized along the rows of the file, so close, and exact only where nothing was done.
        assert found[name].dtype == "F32"
        np.testing.assert_allclose(found[name].read(), array, atol=1e-3)


def test_llama_with_biases_reorders_them_too(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, same: Callable[..., None], tmp_path: Path
) -> None:
    config = resized(configs["llama"], qkv_has_bias=True)
    file = open_gguf(write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config)))
    assert config_of_gguf(file).attention.qkv_bias
    same(from_gguf(file, config), random_checkpoint(config, 0))


def test_head_stored_beside_a_tied_embedding(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["gpt2"]
    values = arrays(config)
    embedding = values["backbone.embedding.word_embedding.embedding_table"]
    path = write_gguf(
        tmp_path / "x.gguf", config, "gpt2", values, tensors={"output.weight": embedding}
    )
    assert "lm_head.weight" not in from_gguf(open_gguf(path), config)
    assert config_of_gguf(open_gguf(path)) == config
    path = write_gguf(
        tmp_path / "y.gguf", config, "gpt2", values, tensors={"output.weight": embedding + 1}
    )
    with pytest.raises(ArtifactError, match="head differs from the word embedding"):
        from_gguf(open_gguf(path), config)
    untied = replace(config, tie_word_embeddings=False)
    assert config_of_gguf(open_gguf(path)) == untied
    found = from_gguf(open_gguf(path), untied)["lm_head.weight"].read()
    np.testing.assert_array_equal(found, embedding + 1)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.5},
            RopeScaling("linear", 2.5, 64),
        ),
        ({"rope.scale_linear": 4.0}, RopeScaling("linear", 4.0, 64)),
        # What is missing is as in llama.cpp.
        ({"rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0, 64)),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.type": "none", "rope.scale_linear": 4.0}, None),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, RopeScaling("linear", 2.0, 64)),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16},
            RopeScaling("yarn", 1.0, 16),
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeScaling("yarn", 4.0, 16, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling(
    extra: dict[str, Any],
    expected: RopeScaling | None,
    configs: Mapping[str, Decoder],
    write_gguf: WriteGguf,
    tmp_path: Path,
) -> None:
    config = configs["llama"]
    path = write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config), extra=extra)
    assert config_of_gguf(open_gguf(path)).rotary.scaling == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequency_factors(
    factor: float, configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = resized(configs["llama"], theta=500000.0)
    scaling = RopeScaling("llama3", factor, 8192)
    factors = llama3_factors(500000.0, config.head_dim, scaling).astype(np.float32)
    assert factors[0] == 1 and factors[-1] == factor
    path = write_gguf(
        tmp_path / "x.gguf", config, "llama", arrays(config), tensors={"rope_freqs.weight": factors}
    )
    file = open_gguf(path)
    assert config_of_gguf(file) == resized(config, rope_scaling=scaling)
    assert "rope_freqs.weight" not in from_gguf(file, config)


def test_other_frequency_factors_are_refused(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["llama"]
    ones = np.ones(8, np.float32)
    for factors, accepted in (
        (ones, True),
        (ones * 2, False),
        (np.arange(1, 9, dtype=np.float32), False),
    ):
        path = write_gguf(
            tmp_path / "x.gguf",
            config,
            "llama",
            arrays(config),
            tensors={"rope_freqs.weight": factors},
        )
        if accepted:
            assert config_of_gguf(open_gguf(path)).rotary.scaling is None
            continue
        with pytest.raises(ArtifactError, match=r"rope_freqs.weight \[8\] does not hold"):
            config_of_gguf(open_gguf(path))


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"expert_shared_count": 1}, "llama.expert_shared_count = 1 is not supported"),
        ({"attention.causal": False}, "llama.attention.causal = false"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "short_factor is None"),
        ({"rope.scaling.attn_factor": 1.5}, "llama.rope.scaling.attn_factor = 1.5"),
        ({"rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported, expected 16"),
        ({"attention.value_length": 8}, "attention.value_length = 8 is not supported, expected 16"),
        ({"attention.temperature_length": 4096}, "llama.attention.temperature_length = 4096"),
        ({"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping = 30.0"),
        ({"of_tomorrow": "yes"}, "llama.of_tomorrow = yes is not supported"),
    ],
)
def test_variants_are_refused(
    extra: dict[str, Any],
    expected: str,
    configs: Mapping[str, Decoder],
    write_gguf: WriteGguf,
    tmp_path: Path,
) -> None:
    config = configs["llama"]
    path = write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config), extra=extra)
    with pytest.raises(ArtifactError, match=expected):
        config_of_gguf(open_gguf(path))


def test_metadata_without_effect(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["llama"]
    extra = {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_count": 0,
        "final_logit_softcapping": 0.0,
        "rope.dimension_count": config.head_dim,
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.finetuned": True,
        "rope.scaling.original_context_length": 8192,
        "tensor_data_layout": "Meta AI original pth",
        "use_parallel_residual": False,
        "vocab_size": config.vocab_size,
    }
    path = write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config), extra=extra)
    assert config_of_gguf(open_gguf(path)) == config


def test_a_llama_with_a_window_is_a_mistral(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["llama"]
    window = {"attention.sliding_window": 8}
    path = write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config), extra=window)
    found = config_of_gguf(open_gguf(path))
    assert (found.architecture, set(found.windows)) == ("mistral", {8})
    assert from_gguf(open_gguf(path), found).keys() == arrays(config).keys()
    biased = {f"blk.0.attn_{name}.bias": np.zeros(4, np.float32) for name in ("q", "k", "v")}
    path = write_gguf(
        tmp_path / "y.gguf", config, "llama", arrays(config), extra=window, tensors=biased
    )
    found = config_of_gguf(open_gguf(path))
    with pytest.raises(ArtifactError, match=r"3 unexpected: blk.0.attn_q.bias"):
        from_gguf(open_gguf(path), found)


def test_windows_of_qwen2_are_refused(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["qwen2"]
    window = {"attention.sliding_window": 8}
    path = write_gguf(tmp_path / "x.gguf", config, "qwen2", arrays(config), extra=window)
    with pytest.raises(ArtifactError, match=r"qwen2.attention.sliding_window = 8 is not supported"):
        config_of_gguf(open_gguf(path))


def test_other_architectures_are_refused(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match="'mamba', expected one of bloom, llama, qwen2, gpt2"):
        config_of_gguf(open_gguf(tmp_path / "x.gguf"))
    write_gguf(tmp_path / "y.gguf", configs["qwen2"], "qwen22", arrays(configs["qwen2"]))
    with pytest.raises(ArtifactError, match=r"'qwen22', expected .*; did you mean qwen2\?"):
        config_of_gguf(open_gguf(tmp_path / "y.gguf"))


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("llama", {}, "llama.block_count is None, expected 1 to "),
        ("llama", {"block_count": 2}, "metadata: hidden_size is None"),
        ("qwen3next", {"block_count": 2**32 - 1}, "qwen3next.block_count is 4294967295, expected"),
        ("granitehybrid", {"block_count": 0}, "granitehybrid.block_count is 0, expected"),
        ("qwen3next", {"block_count": 2}, "metadata of qwen3next .* malformed: .*NoneType"),
        (
            "qwen35",
            RECURRENT | {"ssm.inner_size": 64, "ssm.time_step_rank": 0},
            "metadata of qwen35 is incomplete or malformed: .* by zero",
        ),
        (
            "granitehybrid",  # without a tensor of a recurrent layer
            RECURRENT | {"attention.head_count_kv": 1},
            "metadata of granitehybrid is incomplete or malformed: True is not in list",
        ),
        (
            "gemma4",
            {"block_count": 3},
            r"metadata of gemma4 .*: attention.sliding_window_pattern is None, expected true or",
        ),
        (
            "gemma4",
            {
                **{"block_count": 3, "attention.sliding_window_pattern": [True, False, True]},
                **{"attention.head_count_kv": [2, 1, 1]},
            },
            r"metadata of gemma4 .*: attention.head_count_kv is \[2, 1, 1\], expected the same of",
        ),
    ],
)
def test_missing_and_malformed_metadata_names_the_file(
    architecture: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    for key, value in metadata.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match=f"x.gguf: {message}"):
        config_of_gguf(open_gguf(tmp_path / "x.gguf"))


def test_wrong_tensors_in_the_file_s_own_names(
    configs: Mapping[str, Decoder], write_gguf: WriteGguf, tmp_path: Path
) -> None:
    config = configs["llama"]
    path = write_gguf(tmp_path / "x.gguf", config, "llama", arrays(config))
    with pytest.raises(ArtifactError) as caught:
        from_gguf(open_gguf(path), resized(config, num_layers=3, intermediate_size=90))
    assert "9 missing: blk.2.attn_q.weight [64, 32]" in str(caught.value)
    assert "blk.0.ffn_gate.weight: got [96, 32], expected [90, 32]" in str(caught.value)


def test_smollm2_as_the_gguf_library_reads_it(smollm2_gguf: Path) -> None:
    file = open_gguf(smollm2_gguf)
    config = config_of_gguf(file)
    assert config == ModelConfig(
        family="llama",
        vocab_size=49152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        n_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        seq_length=8192,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        theta=100000.0,
        bos_token_id=1,
        eos_token_id=(2,),
        pad_token_id=2,
    )
    tensors: dict[str, LazyTensor] = from_gguf(file, config)
    packed = file.tensors["blk.7.attn_k.weight"]
    quantization = gguf.GGMLQuantizationType[packed.type_name]
    rows = gguf.quants.dequantize(packed.data.reshape(192, -1), quantization)
    restored = rows.reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    np.testing.assert_array_equal(tensors["model.layers.7.attention.wk.weight"].read(), restored)
