"""AutoConfig and the device that models are made for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import lite_runner
from lite_runner import (
    AutoConfig,
    AutoModel,
    BloomConfig,
    ContextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    build_context,
    init_context,
)
from lite_runner.api.context import chosen
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.tokenizer_files import write_tokenizer


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    yield
    build_context({})


def test_attributes_may_be_read_and_changed() -> None:
    config = AutoConfig.from_pretrained("tiny_llama")
    assert (config.hidden_size, config.batch_size, config.use_past) == (64, 1, True)
    config.seq_length, config.batch_size, config.use_past = 128, 4, False
    assert (config.seq_length, config.batch_size, config.use_past) == (128, 4, False)
    assert config.run_config().model.model_config.seq_length == 128
    copied = config.copy()
    copied.seq_length = 64
    assert config.seq_length == 128
    assert "seq_length: 128" in repr(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("seq_lenght", 3, "did you mean seq_length"),
        ("seq_length", "long", "expected an integer"),
        ("seq_length", 0, ">= 1"),
        ("batch_size", 0, "batch_size: got 0"),
        ("post_layernorm_residual", True, "not available"),
    ],
)
def test_invalid_settings_raise_at_once(name: str, value: object, message: str) -> None:
    config = AutoConfig.from_pretrained("tiny_llama")
    with pytest.raises(ConfigError, match=message):
        setattr(config, name, value)
    with pytest.raises(AttributeError, match="did you mean seq_length"):
        _ = config.seq_lenght
    assert config.seq_length == 256


def test_an_unknown_name_says_what_may_be_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean tiny_llama"):
        AutoConfig.from_pretrained("tiny_lama")


def test_a_yaml_of_run_mindformer(tmp_path: Path) -> None:
    file = tmp_path / "predict.yaml"
    file.write_text(
        "use_parallel: True\nrun_mode: predict\ntrainer: {model_name: tiny_gpt2}\n"
        "model: {model_config: {type: GPT2Config, seq_length: 64}, arch: {type: GPT2LMHeadModel}}\n"
    )
    assert AutoConfig.from_pretrained(file).seq_length == 64
    (tmp_path / "second.yaml").write_text("{}")
    with pytest.raises(ArtifactError, match=r"got 2 yaml files \(predict.yaml, second.yaml\)"):
        AutoConfig.from_pretrained(tmp_path)


def test_bloom_config_takes_the_sizes_given() -> None:
    config = BloomConfig(
        checkpoint_name_or_path="tiny_bloom",
        param_init_type="float16",
        seq_length=32,
        max_decode_length=32,
        top_k=1,
        do_sample=True,
    )
    assert (config.hidden_size, config.seq_length) == (64, 32)
    assert config.checkpoint_name_or_path == "random"
    assert BloomConfig(num_layers=2).checkpoint_name_or_path == "random"  # not bloom_560m's own


def test_llama_config_works_out_the_feed_forward_width() -> None:
    small = LlamaConfig(num_layers=2, hidden_size=32, num_heads=2, seq_length=512)
    model = small.run_config().model_config()
    assert model is not None and (model.architecture, model.head_dim, model.seq_length) == (
        *("llama", 16, 512),
    )
    assert small.intermediate_size == 256 and small.checkpoint_name_or_path == "random"
    assert LlamaConfig().intermediate_size == 11008  # as Llama 2 has it
    assert LlamaConfig(seq_length=64).run_config().generation().max_length == 64
    large = LlamaConfig(hidden_size=8192, multiple_of=4096, ffn_dim_multiplier=1.3)
    assert large.intermediate_size == 28672  # as Llama 2 70B has it
    assert LlamaConfig(hidden_size=64, intermediate_size=100).intermediate_size == 100
    named = LlamaConfig(checkpoint_name_or_path="tiny_llama", seq_length=64)
    assert (named.hidden_size, named.intermediate_size, named.seq_length) == (64, 128, 64)
    with pytest.raises(ConfigError, match="hidden_act: got 'relu', expected silu"):
        LlamaConfig(hidden_act="relu")


def given(context: Mapping[str, object]) -> dict[str, object]:
    """The settings that have a value."""
    return {name: value for name, value in context.items() if value is not None}


def test_the_context_holds_for_the_next_configs() -> None:
    build_context({"context": {"mode": 0, "device_target": "CPU"}, "parallel": {}})
    assert AutoConfig.from_pretrained("tiny_llama").run_config().context.device_target == "CPU"
    assert init_context(context_config=ContextConfig(device_id=1)) == (0, 1)
    assert given(chosen()) == {"mode": 0, "device_target": "auto", "device_id": 1}
    with pytest.raises(ConfigError, match="did you mean device_id"):
        build_context({"context": {"device_idd": 1}})


def test_every_export_is_there_and_none_is_imported_early() -> None:
    for name in lite_runner.__all__:
        assert getattr(lite_runner, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = lite_runner.nothing_like_it
    code = (
        "import sys, lite_runner; print([m for m in sys.modules if m.startswith('lite_runner.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        (GPT2Config, {"hidden_size": 64, "num_heads": 4}, {"vocab_size": 50257, "num_layers": 12}),
        (
            Qwen2Config,
            {"hidden_size": 512, "num_heads": 8, "num_layers": 2, "n_kv_heads": 2},
            {"qkv_has_bias": True, "intermediate_size": 1536, "theta": 1e6},
        ),
        (BloomConfig, {"checkpoint_name_or_path": "tiny_bloom"}, {"hidden_size": 64}),
    ],
)
def test_a_family_of_given_sizes(
    config: type[PretrainedConfig], settings: dict[str, object], expected: dict[str, object]
) -> None:
    instance = config(**settings)  # type: ignore[arg-type]
    assert isinstance(instance, config)
    assert {name: getattr(instance, name) for name in expected} == expected
    again = config.from_pretrained("tiny_gpt2", seq_length=32)  # type: ignore[attr-defined]
    assert again.seq_length == 32


def test_the_environment_says_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    init_context(context_config=ContextConfig(device_target="Ascend", device_id=3))
    assert chosen()["device_target"] == "Ascend"
    monkeypatch.setenv("LITE_RUNNER_DEVICE_TARGET", "CPU")
    assert given(chosen()) == {"mode": 0, "device_target": "CPU", "device_id": 3}


def test_keys_of_the_command_line_are_settings_too() -> None:
    keys = {"kv_cache": "int8", "quant": "a16w4", "threads": 1, "device_target": "CPU", "seed": 3}
    more = {"truncate": "left", "chat": True, "max_new_tokens": 5, "top_k": 3, "adapter_path": "x"}
    config = AutoConfig.from_pretrained("tiny_llama", **keys, **more)
    for name, value in {**keys, **more}.items():
        assert getattr(config, name) == value
    run = config.run_config()
    assert (run.kv_cache, run.quant, run.seed, run.truncate) == ("int8", "a16w4", 3, "left")
    assert (run.context.threads, run.context.device_target) == (1, "CPU")
    assert run.generation().max_new_tokens == 5
    config.quant_group = 64
    assert config.quant_group == 64
    config.context = {"threads": 2, "device_id": 0}
    assert config.threads == 2
    config.pet_config = {"pet_type": "slora", "adapter_path": "lora_adapter.json"}
    assert config.run_config().adapter_path == "lora_adapter.json"
    assert config.pet_config["pet_type"] == "slora"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_cash", "int8", "kv_cash: no such key; did you mean kv_cache"),
        ("kv_cache", "int9", "kv_cache: got 'int9', expected one of fp32, fp16, int8"),
        ("adapter_pth", "x", "did you mean adapter_path"),
        ("thread", 1, "did you mean threads"),
        ("predict_data", "x", "predict_data: a key of a run"),
        ("run_mode", "eval", "run_mode: a key of a run"),
    ],
)
def test_hints_name_a_key_that_there_is(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoConfig.from_pretrained("tiny_llama", **{name: value})


def test_a_model_whose_weights_come_later() -> None:
    config = AutoConfig.from_pretrained("gpt2")
    assert config.checkpoint_name_or_path != "random"
    config.checkpoint_name_or_path = None
    assert (
        config.checkpoint_name_or_path
        == config.run_config().model.model_config.checkpoint_name_or_path
        == "random"
    )


def test_checkpoint_name_or_path_replaces_the_weights_of_folder_and_yaml(
    write_tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """004's predict_custom.py: the sizes and the tokenizer stay those of the folder."""
    folder = write_tiny_llama("model")
    write_tokenizer(byte_tokenizer(), folder)
    other = tmp_path / "elsewhere" / "other.ckpt"
    other.parent.mkdir()
    model = AutoConfig.from_pretrained("tiny_llama").run_config().model_config()
    assert model is not None
    write_ckpt(other, random_checkpoint(model, seed=7))
    yaml = tmp_path / "predict.yaml"
    yaml.write_text(
        "run_mode: predict\ntrainer: {model_name: tiny_llama}\n"
        f"load_checkpoint: {folder / 'model.safetensors'}\n"
    )

    def generated(config: PretrainedConfig) -> list[list[int]]:
        network = AutoModel.from_config(config)
        assert network.tokenizer("ab")["input_ids"]
        return network.generate([5, 6, 7], max_new_tokens=6, eos_token_id=[])

    wanted = AutoModel.from_pretrained("tiny_llama", checkpoint_name_or_path=other)
    expected = wanted.generate([5, 6, 7], max_new_tokens=6, eos_token_id=[])
    for source in (folder, yaml, folder / "model.safetensors"):
        config = AutoConfig.from_pretrained(source)
        assert generated(config) != expected
        config.checkpoint_name_or_path = str(other)
        assert config.checkpoint_name_or_path == str(other)
        assert generated(config) == expected
        config.checkpoint_name_or_path = str(folder)
        assert generated(config) != expected
        in_call = AutoModel.from_pretrained(source, checkpoint_name_or_path=other)
        assert in_call.generate([5, 6, 7], max_new_tokens=6, eos_token_id=[]) == expected
    config.checkpoint_name_or_path = None
    assert config.run_config().checkpoint_source == "random"
    config.checkpoint_name_or_path = "bloom_560m"  # a model's name: its published weights
    assert config.run_config().checkpoint_source == "hf://bigscience/bloom-560m"
