"""run_mode=convert from the command line; the formats themselves are in tests/weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from lite_runner.app import main
from lite_runner.text.spelling import byte_alphabet

VOCABULARY = [
    *byte_alphabet(),
    *("<s>", "</s>", "<pad>", "<|eot|>", "<|eom|>"),
    *("th", "the", "\u0120the", "\u0120a"),
]
MERGES = ["t h", "th e", "\u0120 the", "\u0120 a"]
TEMPLATE = "{% for m in messages %}{{ bos_token }}the {{ m.content }}{{ eos_token }}{% endfor %}"
CONVERT = ["verbosity=0", "run_mode=convert", "convert_format=huggingface", "model=auto"]


@pytest.fixture
def model_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama of one layer and random weights, with a tokenizer and a chat template."""
    monkeypatch.chdir(tmp_path)
    writer = gguf.GGUFWriter("model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3 if 256 <= id <= 260 else 1 for id in range(len(VOCABULARY))])
    writer.add_token_merges(MERGES)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    for id, name in enumerate(("bos", "eos", "padding", "eot", "eom"), 256):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(VOCABULARY), 32),
        "output_norm": (32,),
        **dict.fromkeys(("blk.0.attn_norm", "blk.0.ffn_norm"), (32,)),
        **dict.fromkeys(("blk.0.attn_q", "blk.0.attn_output"), (32, 32)),
        **dict.fromkeys(("blk.0.attn_k", "blk.0.attn_v"), (16, 32)),
        **dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up"), (64, 32)),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


def convert(target: str, *overrides: str) -> list[str]:
    """The files that a conversion to the folder `target` wrote."""
    assert main([*CONVERT, f"convert_output={target}", *overrides]) == 0
    return sorted(file.name for file in Path(target).iterdir())


def rows(*overrides: str) -> list[dict[str, Any]]:
    prompts = "predict_data=['the end','\U0001f600 a the 12']"
    assert main(["verbosity=0", "model=auto", prompts, "max_new_tokens=8", *overrides]) == 0
    result = json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = result["results"]
    return found


@pytest.mark.usefixtures("model_gguf")
def test_the_folder_made_of_a_gguf_gives_the_same_texts() -> None:
    assert convert("hf", "load_checkpoint=model.gguf") == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    plain = rows("load_checkpoint=model.gguf")
    assert rows("load_checkpoint=hf") == plain
    assert plain[0]["prompt_tokens"] == len(["<s>", "the", *" end"])
    chats = rows("load_checkpoint=model.gguf", "chat=true")
    assert rows("load_checkpoint=hf", "chat=true") == chats
    assert chats[0]["prompt_tokens"] == len(["<s>", "the", " the", *" end", "</s>"])
    config = json.loads(Path("hf/config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == [257, 259, 260]


@pytest.mark.usefixtures("model_gguf")
def test_a_named_tokenizer_takes_the_place_of_the_ggufs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    Path("words").mkdir()
    words.save("words/tokenizer.json")
    key = "processor.tokenizer.tokenizer_file"
    convert("hf", "load_checkpoint=model.gguf", f"{key}=words")
    assert json.loads(Path("hf/tokenizer.json").read_text())["model"]["vocab"] == {"a": 0, "b": 1}
    Path("words/tokenizer.json").write_text("{}")
    arguments = ["load_checkpoint=model.gguf", "convert_output=other", f"{key}=words"]
    assert main([*CONVERT, *arguments]) == 4
    assert "not a tokenizer" in capsys.readouterr().err
    assert not Path("other").exists()


@pytest.mark.usefixtures("model_gguf")
def test_one_file_stays_one_file(tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    for form in ("ckpt", "safetensors"):
        target = [f"convert_format={form}", f"convert_output=to/x.{form}"]
        assert main([*CONVERT, *target, "load_checkpoint=model.gguf"]) == 0
    assert {file.name for file in Path("to").iterdir()} == {"x.ckpt", "x.safetensors"}
    assert {path.name for path in set(tmp_path.iterdir()) - before} == {"to", "outputs"}


def test_a_checkpoint_without_a_tokenizer_converts(
    write_tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny_llama("model")
    assert convert("hf", "load_checkpoint=model") == ["config.json", "model.safetensors"]
