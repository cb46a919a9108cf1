"""The text of one sequence as its tokens arrive, cut at the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner.text.streaming import StreamDecoder
from lite_runner.text.tokenizer import Tokenizer


class Transcript:
    """Give it tokens; it gives back text that is certain, and knows when to stop."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._decoder = StreamDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""  # may be the start of a stop text

    def put(self, token_id: int) -> str:
        """The text that this token makes certain; nothing once a stop text was met."""
        return "" if self.stopped else self._take(self._decoder.put(token_id))

    def finish(self) -> str:
        """The text that was held back, now that no token follows."""
        if self.stopped:
            return ""
        certain = self._take(self._decoder.finish())
        rest, self._held = self._held, ""
        self.text += rest
        return certain + rest

    def _take(self, piece: str) -> str:
        text = self._held + piece
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped = True
            certain, self._held = text[: min(found)], ""
        else:
            kept = self._overlap(text)
            certain, self._held = text[: len(text) - kept], text[len(text) - kept :]
        self.text += certain
        return certain

    def _overlap(self, text: str) -> int:
        """How many last characters of `text` are the first ones of a stop text."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
