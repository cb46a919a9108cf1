"""MindFormers' tools for scripts, besides models."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import mindspore as ms
import pytest
from mindspore.common.initializer import One

from lite_runner import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LoraConfig,
    MindFormerConfig,
    PetConfig,
    Trainer,
    TransformerOpParallelConfig,
    build_context,
    build_parallel_config,
    get_last_checkpoint,
    get_real_rank,
    logger,
    progress,
    str2bool,
    transform_and_load_checkpoint,
)
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint


def test_str2bool() -> None:
    assert [str2bool(text) for text in ("True", "1", "yes", "false", "NO", "0")] == [
        *(True, True, True, False, False, False)
    ]
    with pytest.raises(argparse.ArgumentTypeError, match="got 'maybe', expected True or False"):
        str2bool("maybe")


def test_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK_ID", raising=False)
    assert get_real_rank() == 0
    monkeypatch.setenv("RANK_ID", "3")
    assert get_real_rank() == 3
    monkeypatch.setenv("RANK_ID", "-1")
    with pytest.raises(ConfigError, match="RANK_ID: got '-1'"):
        get_real_rank()


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no checkpoint"):
        get_last_checkpoint(tmp_path)
    with pytest.raises(ArtifactError, match="no such folder"):
        get_last_checkpoint(tmp_path / "rank_0")
    for name, age in (("b.ckpt", 30), ("a.safetensors", 10), ("c.ckpt", 20), ("d.txt", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (10_000 - age, 10_000 - age))
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "a.safetensors")
    os.utime(tmp_path / "c.ckpt", (9_990, 9_990))
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "c.ckpt")


def test_the_logger_says_its_lines_once(capsys: pytest.CaptureFixture[str]) -> None:
    logger.info("ckpt path: %s", "a.ckpt")
    logger.debug("not this")
    progress.configure(0)
    logger.warning("nor this")
    progress.configure(1)
    assert capsys.readouterr() == ("", "ckpt path: a.ckpt\n")


YAML = """
seed: 0
run_mode: 'predict'
load_checkpoint: ''
use_parallel: False
context: {mode: 0, device_target: "CPU", max_device_memory: "58GB", save_graphs: False}
parallel: {parallel_mode: 1, gradients_mean: False, full_batch: True}
parallel_config: {data_parallel: 8, model_parallel: 1, pipeline_stage: 1, use_seq_parallel: False}
trainer: {type: CausalLanguageModelingTrainer, model_name: 'tiny_llama'}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 128
    hidden_size: 64
    num_layers: 2
    num_heads: 4
    n_kv_heads: 2
    intermediate_size: 128
    vocab_size: 320
    compute_dtype: float32
    checkpoint_name_or_path: ""
  arch: {type: LlamaForCausalLM}
processor: {return_tensors: ms, tokenizer: {type: LlamaTokenizer}}
"""
OPTIONS = {"max_new_tokens": 5, "eos_token_id": []}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "predict_llama2_7b.yaml"
    path.write_text(YAML)
    return str(path)


def test_keys_are_attributes(file: str) -> None:
    config = MindFormerConfig(file, use_parallel=True, model={"model_config": {"use_past": True}})
    section = config.model.model_config
    assert (section.seq_length, section["use_past"], config.use_parallel) == (128, True, True)
    assert config.moe_config is None and config.get("moe_config") is None
    config.moe_config = {"expert_num": 1}
    assert config["moe_config"].expert_num == 1
    config.merge_from_dict({"model.model_config.seq_length": 64, "a.b.c": 1})
    assert (section.seq_length, config.a.b.c) == (64, 1)
    copied = copy.deepcopy(config)
    copied.model.model_config.seq_length = 32
    del copied.a
    assert section.seq_length == 64 and config.a and copied.a is None
    plain = config.to_dict()
    assert type(plain["model"]["model_config"]) is dict and plain["a"] == {"b": {"c": 1}}
    with pytest.raises(ConfigError, match="No such file"):
        MindFormerConfig("absent.yaml")


def test_a_model_of_it(file: str) -> None:
    config = MindFormerConfig(file)
    config.parallel_config.data_parallel = 1
    build_context(config)
    assert build_parallel_config(config) is config
    assert isinstance(config.parallel_config, TransformerOpParallelConfig)
    config.model.model_config.batch_size = 2
    config.model.model_config.parallel_config = config.parallel_config
    named = LlamaConfig(**config.model.model_config)
    assert (named.seq_length, named.batch_size, named.n_kv_heads) == (128, 2, 2)
    expected = AutoModel.from_pretrained(file).generate([1, 2], **OPTIONS)
    assert AutoModel.from_config(config).generate([1, 2], **OPTIONS) == expected
    assert AutoConfig.from_pretrained(config, seq_length=64).seq_length == 64
    trainer = Trainer(config, task="text_generation")
    assert trainer.model.generate([1, 2], **OPTIONS) == expected
    build_context({})


def test_weights_that_are_loaded_into_a_model(file: str, tmp_path: Path) -> None:
    """As MindFormers' scripts of a model do it: run_llama2_generate.py and the like."""
    config = MindFormerConfig(file)
    model_config = LlamaConfig(**config.model.model_config)
    model_config.checkpoint_name_or_path = None
    network = LlamaForCausalLM(model_config)
    own = network.generate([1, 2], **OPTIONS)
    with pytest.raises(ConfigError, match="load_checkpoint is empty"):
        transform_and_load_checkpoint(config, None, network, do_predict=True)
    model = model_config.run_config().model_config()
    assert model is not None
    write_ckpt(tmp_path / "llama.ckpt", random_checkpoint(model, seed=7))
    config.load_checkpoint = str(tmp_path / "llama.ckpt")
    ids = ms.Tensor(shape=(1, 128), dtype=ms.int32, init=One())
    inputs = network.prepare_inputs_for_predict_layout(ids)
    transform_and_load_checkpoint(config, ms.Model(network), network, inputs, do_predict=True)
    loaded = network.generate([1, 2], **OPTIONS)
    config.model.model_config.checkpoint_name_or_path = config.load_checkpoint
    named = LlamaForCausalLM(LlamaConfig(**config.model.model_config))
    assert own != loaded == named.generate([1, 2], **OPTIONS)


def test_invalid_yaml(file: str) -> None:
    config = MindFormerConfig(file)
    config.model.model_config.seq_lenght = 64
    with pytest.raises(ConfigError, match=r"seq_lenght.* did you mean"):
        AutoModel.from_config(config)
    with pytest.raises(ConfigError, match="did you mean model_parallel"):
        build_parallel_config(MindFormerConfig(parallel_config={"model_paralel": 2}))


def test_a_lora_config_is_the_section_of_a_yaml() -> None:
    found = LoraConfig(lora_rank=4, target_modules=".*wq", lora_dropout=0.1)
    assert isinstance(found, PetConfig) and found.lora_alpha == 16
    model = AutoConfig.from_pretrained("tiny_llama", pet_config=found)
    assert model.pet_config["lora_rank"] == 4 and PetConfig().pet_type is None


def test_sections_are_configs_however_they_are_set() -> None:
    config = MindFormerConfig()
    config.update({"a": {"b": 1}}, c={"d": 2})
    assert (config.a.b, config.c.d) == (1, 2)
    assert config.setdefault("e", {"f": 3}).f == 3 and config.setdefault("a", 5).b == 1


def test_a_lora_config_without_modules_is_refused() -> None:
    with pytest.raises(ConfigError, match="target_modules: missing; expected a string or a list"):
        AutoModel.from_pretrained("tiny_llama", pet_config=LoraConfig())
