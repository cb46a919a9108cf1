"""Tokenizers in folders."""

from __future__ import annotations

import json
from pathlib import Path

from lite_runner.text.tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Its files, beside what the folder has."""
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")


def write_ascii_tokenizer(folder: Path, ids: int = 96) -> None:
    """One for a model of so few ids, as Hugging Face's tokenizers write it: an id a character."""
    texts = ["<unk>", "<s>", "</s>", " ", *map(chr, range(ord('"'), 127))]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: id for id, text in enumerate(texts[:ids])},
            "unk_token": "<unk>",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
