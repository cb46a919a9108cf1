# ruff: noqa: RUF001  (texts of many scripts)
from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = [
    "Hello world",
    " Hello  world ",
    "The capital of France is Paris, the capital of Spain is Madrid.",
    "Das ist ein schöner Tag, nicht wahr? Straße",
    "Привет, как дела?",
    "你好，世界！今天天气怎么样？",
    "日本語のテキスト",
    "नमस्ते दुनिया",
    "def f(x):\n    return x ** 2  # comment\n\n\nclass A:\n\tpass\n",
    "0 1 12 123 1234 3.14159 1e-10 1,000,000",
    "   ",
    "\t\ttabs\t and   spaces    here     x",
    "😀😃🎉 👨‍👩‍👧‍👦 family 🏳️‍🌈 👍🏽 thumbs",
    "e\u0301 n\u0303 Z̷a̸l̵g̴o̶",
    "I'm you're he'll we've they'd it's",
    "(((nested [brackets] {here})))",
    "aaaaaaaaaaaaaaaa bbb banana ananas",
    "",
]


@pytest.fixture
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """A byte-level BPE of 400 tokens, as GPT-2's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path, byte_level: tokenizers.Tokenizer) -> Callable[..., Path]:
    """`folder(chat_template=...)`: a tokenizer.json with these keys in tokenizer_config.json."""

    def make(**config: Any) -> Path:
        path = tmp_path / "tokenizer"
        path.mkdir(exist_ok=True)
        byte_level.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return path

    return make


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`sentencepiece_model(model_type="bpe", ...)`: a tokenizer.model trained with the options.

    By default as Llama's: bytes for unknown characters, text left as it is.
    """
    models: dict[str, Path] = {}

    def make(**options: Any) -> Path:
        options = {
            "model_type": "bpe",
            "vocab_size": 460,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "split_digits": True,
            "allow_whitespace_only_pieces": True,
            "character_coverage": 0.98,
            "hard_vocab_limit": False,
            **options,
        }
        key = json.dumps(options)
        if key not in models:
            data = io.BytesIO()
            lines = [line for text in TEXTS for line in text.split("\n") if line.strip()]
            sentencepiece.SentencePieceTrainer.Train(
                sentence_iterator=iter(lines), model_writer=data, minloglevel=2, **options
            )
            models[key] = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
            models[key].write_bytes(data.getvalue())
        return models[key]

    return make


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf(tokens=[...], pre="gpt-2", ...)`: a file with these tokenizer.ggml keys."""

    def make(chat_template: str | None = None, **keys: Any) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in keys.items():
            key = f"tokenizer.ggml.{name}"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        if chat_template is not None:
            writer.add_chat_template(chat_template)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return path

    return make
