"""Log-probabilities in the two forms of OpenAI's protocol."""

from __future__ import annotations

from typing import Any

from lite_runner.generation import Logprobs
from lite_runner.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # in place of minus infinity, which is not JSON


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone as text; bytes that are no whole character are U+FFFD."""
    return tokenizer.decode([token], skip_special_tokens=False)


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """The bytes of a token alone."""
    if tokenizer.spelling is not None:
        return list(tokenizer.token_bytes(token, skip_special_tokens=False))
    return list(token_text(tokenizer, token).encode())


def chat_entry(tokenizer: Tokenizer, token: int, found: Logprobs) -> dict[str, Any]:
    """One element of choices[].logprobs.content: `found` is of this token alone."""

    def entry(id: int, value: float) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, id),
            "logprob": max(float(value), _LOWEST),
            "bytes": token_bytes(tokenizer, id),
        }

    pairs = zip(found.top_ids[0].tolist(), found.top[0].tolist(), strict=True)
    return entry(token, found.chosen[0]) | {"top_logprobs": [entry(*pair) for pair in pairs]}


class CompletionLogprobs:
    """choices[].logprobs of a completion."""

    def __init__(self, tokenizer: Tokenizer, offset: int = 0) -> None:
        """`offset`: characters of the text before the first token."""
        self._tokenizer, self._offset = tokenizer, offset
        self.plain: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }

    @property
    def offset(self) -> int:
        """Characters up to here."""
        return self._offset

    def add(self, token: int, found: Logprobs | None, row: int = 0) -> None:
        """A token, and `row` of `found`; None: nothing predicts it."""
        text = token_text(self._tokenizer, token)
        self.plain["text_offset"].append(self._offset)
        self.plain["tokens"].append(text)
        self._offset += len(text)
        if found is None:
            self.plain["token_logprobs"].append(None)
            self.plain["top_logprobs"].append(None)
            return
        self.plain["token_logprobs"].append(max(float(found.chosen[row]), _LOWEST))
        pairs = zip(found.top_ids[row].tolist(), found.top[row].tolist(), strict=True)
        best: dict[str, float] = {}
        for id, value in pairs:  # two tokens may read the same
            best.setdefault(token_text(self._tokenizer, id), max(value, _LOWEST))
        self.plain["top_logprobs"].append(best)
