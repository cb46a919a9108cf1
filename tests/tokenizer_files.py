"""Tokenizers in folders."""

from __future__ import annotations

from pathlib import Path

from lite_runner.text.tokenizer import Tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Its files, beside what the folder has."""
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")
