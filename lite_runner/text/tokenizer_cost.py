"""Bounds on the cost of a tokenizer.json, computed from its parts before any text is tokenized.

Oniguruma, which runs its regular expressions, backtracks, and the library panics where it gives up.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from lite_runner.errors import ArtifactError
from lite_runner.system.regex_cost import check_cost

MAX_GROWTH = 64  # growth factor of a text by all replacements in turn
MAX_PREFIX = 64  # characters before each piece of a text, or tokens around it
MAX_WORD = 1000  # characters of a word that WordPiece cuts, in a time that grows with their cube
MAX_SPLITS = 1 << 28  # characters of all ways to split all tokens in two


def check_splits(tokens: Iterable[str | bytes], source: str) -> None:
    """Raises ArtifactError naming `source` where finding the merges of a vocabulary, which looks
    every split of every token up, would take minutes or gigabytes."""
    total = sum(len(token) ** 2 for token in tokens)
    if total > MAX_SPLITS:
        raise ArtifactError(
            f"{source}: the splits of its tokens have {total:,} characters, expected at most"
            f" {MAX_SPLITS:,}",
            "the file is damaged, or not a vocabulary: fetch it again",
        )


def check_tokenizer(backend: tokenizers.Tokenizer) -> None:
    """Raises ValueError, which says why, where a pattern of a tokenizer may take forever, or its
    replacements may make a short text a huge one."""
    for part in (backend.normalizer, backend.pre_tokenizer, backend.decoder):
        if part is None:
            continue
        growth = 1.0
        for step in _objects(json.loads(part.__getstate__())):
            pattern = step.get("Regex")
            if isinstance(pattern, str):
                try:
                    check_cost(pattern)
                except ValueError as error:
                    raise ValueError(f"the pattern {pattern[:80]!r}: {error}") from None
            if step.get("type") == "Replace":
                growth *= _growth(step)
            if step.get("type") == "Precompiled":
                growth *= _charsmap_growth(step["precompiled_charsmap"])
            if len(str(step.get("prepend", ""))) > MAX_PREFIX:
                raise ValueError(f"a prefix of more than {MAX_PREFIX} characters")
        if growth > MAX_GROWTH:
            raise ValueError(f"its replacements make a text {growth:.3g} times as long")
    if getattr(backend.model, "max_input_chars_per_word", 0) > MAX_WORD:
        raise ValueError(f"words of more than {MAX_WORD} characters (max_input_chars_per_word)")
    if backend.post_processor is not None:
        _check_templates(json.loads(backend.post_processor.__getstate__()))


def _check_templates(processor: dict[str, Any]) -> None:
    """Raises ValueError where a template repeats a text, or puts too many tokens around it."""
    for step in _objects(processor):
        if step.get("type") != "TemplateProcessing":
            continue
        texts = [piece for piece in step["single"] if "Sequence" in piece]
        around = [
            step["special_tokens"][piece["SpecialToken"]["id"]]
            for piece in step["single"]
            if "SpecialToken" in piece
        ]
        count = sum(len(token["ids"]) for token in around)
        if len(texts) != 1 or count > MAX_PREFIX:
            raise ValueError(
                f"a template of {len(texts)} texts and {count} tokens, expected one text and at"
                f" most {MAX_PREFIX} tokens"
            )


def _growth(replace: dict[str, Any]) -> float:
    """The factor by which a Replace may lengthen a text."""
    pattern, content = replace["pattern"], len(replace["content"])
    taken = len(pattern.get("String", "")) or 1
    return max(1.0, content / taken, content + 1 if pattern.get("String") == "" else 0)


def _charsmap_growth(encoded: str) -> float:
    """The same of SentencePiece's character map: a trie's size, the trie, and its replacements,
    each with a NUL behind it."""
    raw = base64.b64decode(encoded)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(1.0, *(len(text.decode("utf-8", "ignore")) for text in texts))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, dict | list):
            yield from _objects(child)
