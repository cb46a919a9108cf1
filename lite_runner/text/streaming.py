"""Streaming detokenization: text that no later token can change, and stop strings in it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

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


class Transcript:
    """Takes tokens, emits final text, and detects stop strings."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        continues: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`continues`: see StreamDecoder."""
        self.text = ""
        self.stop_string: str | None = None  # that has ended it
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, continues=continues)
        self._stop = tuple(stop)
        self._buffer = ""  # may be the start of a stop string

    @property
    def stopped(self) -> bool:
        """True behind a stop string."""
        return self.stop_string is not None

    def put(self, token_id: int) -> str:
        """The text that this token makes final; empty after a stop string."""
        return "" if self.stopped else self._take(self._decoder.put(token_id))

    def finish(self) -> str:
        """The buffered text, when no token follows."""
        if self.stopped:
            return ""
        final = self._take(self._decoder.finish())
        rest, self._buffer = self._buffer, ""
        self.text += rest
        return final + rest

    def _take(self, piece: str) -> str:
        text = self._buffer + piece
        found = [(index, stop) for stop in self._stop if (index := text.find(stop)) >= 0]
        if found:
            place, self.stop_string = min(found)
            final, self._buffer = text[:place], ""
        else:
            kept = self._overlap(text)
            final, self._buffer = text[: len(text) - kept], text[len(text) - kept :]
        self.text += final
        return final

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
