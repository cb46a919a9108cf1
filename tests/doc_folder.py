"""The folder for the commands of README and docs/: the files that they name."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copyfile

import numpy as np
from safetensors.numpy import save_file

from lite_runner import app
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from tests.models import model_named
from tests.paths import ROOT
from tests.tiny_gguf import write_tiny_gguf

# The keys of a MindFormers yaml that matter here; without sizes they are Llama 2's.
YAML = """
run_mode: predict
use_parallel: True
output_dir: ./output
trainer: {type: CausalLanguageModelingTrainer, model_name: llama2_7b}
parallel_config: {data_parallel: 1, model_parallel: 2}
context: {device_target: Ascend}
processor: {tokenizer: {type: ByteTokenizer}}
model:
  arch: {type: LlamaForCausalLM}
  model_config: {type: LlamaConfig, seq_length: 512, use_past: True, compute_dtype: float16%s}
"""
SIZES = (
    ", hidden_size: 64, num_layers: 2, num_heads: 4, n_kv_heads: 2, head_dim: 24"
    ", intermediate_size: 128, vocab_size: 320"
)  # those of tiny_llama
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
WIDTH, LAYERS = 32, 1  # of the tiny GGUF
TINY = "tiny.gguf"


def lay_out(folder: Path) -> None:
    """Small files of the names in the pages, in the current folder; models are tiny and random."""
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "prompts.txt").write_text("The capital of France is\nOne, two,\n")
    for name in ("train", "held_out", "help", "other"):
        copyfile("examples/pirate.jsonl", folder / f"{name}.jsonl")  # the pages write some anew
    for name, sizes in (("predict_llama2_7b", ""), ("dist", ""), ("predict_tiny_llama", SIZES)):
        (folder / f"{name}.yaml").write_text(YAML % sizes)
    write_tiny_gguf(folder / TINY)
    (folder / "Qwen2.5-0.5B-Instruct-Q8_0.gguf").symlink_to(TINY)
    words = f"run_mode=convert model={TINY} convert_format=huggingface verbosity=0"
    assert app.main([*words.split(), "convert_output=path/to/hf-folder"]) == 0
    write_ckpt(folder / "llama2_7b.ckpt", random_checkpoint(model_named("tiny_llama"), seed=5))
    (folder / "path/to/llama2_7b.ckpt").symlink_to("../../llama2_7b.ckpt")
    mine = folder / "path/to/my_llama"
    mine.mkdir()
    for file in (folder / "path/to/hf-folder").iterdir():
        text = file.read_bytes().replace(b'"model_type": "llama"', b'"model_type": "my_llama"')
        (mine / file.name).write_bytes(text)
    (folder / "adapters").mkdir()
    (folder / "lora_adapter.json").write_text('{"pirate": "pirate", "french": "french"}\n')
    for seed, name in enumerate(("pirate", "french")):
        write_adapter(folder / name, seed)


def write_adapter(folder: Path, seed: int) -> None:
    """A random adapter of the tiny GGUF as PEFT writes it."""
    folder.mkdir()
    draw = np.random.default_rng(seed).standard_normal
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(LAYERS):
        tensors[name.format(layer, "A")] = draw((2, WIDTH), np.float32) / WIDTH
        tensors[name.format(layer, "B")] = draw((WIDTH, 2), np.float32) / WIDTH
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))
