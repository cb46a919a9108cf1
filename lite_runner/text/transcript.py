"""Streamed text of one sequence, ended by the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.text.streaming import StreamDecoder
from lite_runner.text.tokenizer import Tokenizer


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
        self.stopped = False
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, continues=continues)
        self._stop = tuple(stop)
        self._buffer = ""  # may be the start of a stop string

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
        found = [index for index in map(text.find, self._stop) if index >= 0]
        if found:
            self.stopped = True
            final, self._buffer = text[: min(found)], ""
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
