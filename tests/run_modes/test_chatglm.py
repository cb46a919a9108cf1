"""ChatGLM from the command line: chats, several adapters, and both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lite_runner.text import load_tokenizer
from tests.chatglm_folders import write_chatglm3

Run = Callable[..., dict[str, Any]]
FUSED = {"self_attention.query_key_value": (48, 96), "mlp.dense_h_to_4h": (48, 160)}
PREDICT = ["verbosity=0", "max_new_tokens=6", "eos_token_id=[]"]


def write_adapter(folder: Path, rank: int) -> None:
    """Of the fused modules, as peft writes it, with random values."""
    random = np.random.default_rng(rank)
    tensors = {}
    for module, (wide_in, wide_out) in FUSED.items():
        name = f"base_model.model.transformer.encoder.layers.0.{module}"
        for part, shape in (("A", (rank, wide_in)), ("B", (wide_out, rank))):
            values = random.normal(0, 0.3, shape).astype(np.float32)
            tensors[f"{name}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [module.partition(".")[2] for module in FUSED]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def tokens(result: dict[str, Any]) -> list[list[int]]:
    return [row["token_ids"] for row in result["results"]]


def test_each_prompt_of_a_chat_has_its_adapter(run: Run, tmp_path: Path) -> None:
    model = write_chatglm3(tmp_path / "model")
    write_adapter(tmp_path / "en", 4)
    write_adapter(tmp_path / "zh", 2)
    (tmp_path / "lora_adapter.json").write_text('{"en": "en", "zh": "zh"}', encoding="utf-8")
    given = [f"model={model}", "adapter_path=lora_adapter.json", "chat=true", *PREDICT]
    mixed = run("run_mode=slora", *given, "predict_data=[Hi,Hi,Hi]", "adapter_id=[en,base,zh]")
    for found, name in zip(tokens(mixed), ("en", "base", "zh"), strict=True):
        assert [found] == tokens(run(*given, "predict_data=Hi", f"adapter_id={name}"))
    assert len({tuple(row) for row in tokens(mixed)}) == 3
    ids = load_tokenizer(model, model_vocab=None).encode_chat([{"role": "user", "content": "Hi"}])
    assert [row["prompt_tokens"] for row in mixed["results"]] == [len(ids)] * 3


def test_backends_compute_the_same(run: Run, tmp_path: Path) -> None:
    """MindSpore's chatglm-6b is compared with transformers' in mindspore/test_backend."""
    model = write_chatglm3(tmp_path / "model")
    line = [f"model={model}", "predict_data=[The ship left,你好]", *PREDICT]
    assert tokens(run(*line)) == tokens(run(*line, "backend=ms"))
