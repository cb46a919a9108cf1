"""Streaming detokenization: emits only text that no later token can change."""

from __future__ import annotations

import codecs

from lite_runner.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Decodes a sequence token by token; the joined pieces equal `tokenizer.decode(all)`.

    Nearly every tokenizer maps tokens to bytes, which are decoded incrementally. For any other, the
    last emitted tokens are decoded again together with the new ones, since a token's text may
    depend on its neighbours; this window slides, so the cost is linear.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, continues: bool = False
    ) -> None:
        """`continues`: other text stands before, so a leading space is not dropped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Until the first text is emitted.
        spelling = tokenizer.spelling
        self._strip = not continues and spelling is not None and spelling.strips_space
        self._context: list[int] = []  # already emitted
        self._pending: list[int] = []

    def put(self, token_id: int) -> str:
        """The text that is final now; empty while a character is incomplete."""
        if self._tokenizer.spelling is not None:
            data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
            return self._strip_space(self._utf8.decode(data))
        self._pending.append(token_id)
        text = self._pending_text()
        return "" if text.endswith(_REPLACEMENT) else self._slide(text)

    def finish(self) -> str:
        """The remaining text; incomplete characters become U+FFFD."""
        rest = self._strip_space(self._utf8.decode(b"", final=True))
        return rest + self._slide(self._pending_text())

    def _strip_space(self, text: str) -> str:
        if not (self._strip and text):
            return text
        self._strip = False
        return text.removeprefix(" ")

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _slide(self, text: str) -> str:
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""
