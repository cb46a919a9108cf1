"""Bounds on the cost of a tokenizer.json, computed from its parts before any text is tokenized.

Oniguruma, which runs its regular expressions, backtracks, and the library panics where it gives up.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from lite_runner.system.regex_cost import check_cost

MAX_GROWTH = 64  # growth factor of a text by all replacements in turn
MAX_PREFIX = 64  # characters before each piece of a text


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
