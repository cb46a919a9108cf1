"""Streamers: take tokens while `generate` runs.

For each sequence `put` gets the prompt's ids, then every new id but an eos token, which is no text,
and `end` says that it is over; of several sequences each comes whole, in the order of the prompts.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from lite_runner import progress
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ConfigError
from lite_runner.text.spelling import StreamDecoder


class Streamer(Protocol):
    """A receiver of tokens for `streamer=`."""

    def put(self, value: Any) -> None: ...
    def end(self) -> None: ...


class TextStreamer:
    """Writes the text of one sequence after another to standard output as it becomes certain."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizer,
        skip_prompt: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_prompt = skip_prompt
        self._skip_special_tokens = skip_special_tokens
        self._at_prompt = True
        self._decoder = StreamDecoder(tokenizer.core, skip_special_tokens)

    def put(self, value: Any) -> None:
        """Ids of one sequence: an integer, or a list, array or tensor of shape [n] or [1, n].

        The first ones after the start or an `end` are the prompt. Raises ConfigError for several
        sequences at once.
        """
        ids = np.atleast_1d(np.asarray(value))
        if ids.ndim > 2 or (ids.ndim == 2 and len(ids) > 1):
            raise ConfigError(
                f"streamer.put: got ids of shape {ids.shape}, expected those of one sequence",
                "put one sequence after another, with end() between them",
            )
        is_prompt, self._at_prompt = self._at_prompt, False
        if is_prompt and self._skip_prompt:
            return
        text = "".join(self._decoder.put(int(id)) for id in ids.reshape(-1))
        if text:
            self.on_finalized_text(text)

    def end(self) -> None:
        """The sequence is over: release the text that was held back."""
        rest = self._decoder.finish()
        self._decoder = StreamDecoder(self._tokenizer.core, self._skip_special_tokens)
        self._at_prompt = True
        self.on_finalized_text(rest, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take text that no later token changes; a subclass may do something else with it."""
        progress.text(text + "\n" if stream_end else text)


class TextIteratorStreamer(TextStreamer):
    """An iterator over the text, for another thread than that of `generate`.

    It ends with the sequence; iterating once more gives the next sequence.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizer,
        skip_prompt: bool = False,
        timeout: float | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        """`timeout`: seconds to wait for the next piece, then queue.Empty; None: without end."""
        super().__init__(tokenizer, skip_prompt, skip_special_tokens)
        self._timeout = timeout
        self._pieces: queue.Queue[str | None] = queue.Queue()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Keep the text for the iterator."""
        if text:
            self._pieces.put(text)
        if stream_end:
            self._pieces.put(None)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self._pieces.get(timeout=self._timeout)
        if piece is None:
            raise StopIteration
        return piece


class SequentialStream:
    """Puts sequences that grow together into a streamer one after another."""

    def __init__(self, streamer: Streamer, prompts: list[list[int]]) -> None:
        self._streamer = streamer
        self._prompts = prompts
        self._waiting: list[list[int]] = [[] for _ in prompts]
        self._done: set[int] = set()
        self._now = 0
        self._begin()

    def on_token(self, prompt: int, token: int) -> None:
        """Sequence `prompt` has a new token."""
        if prompt == self._now:
            self._streamer.put(np.array([token], np.int32))
        else:
            self._waiting[prompt].append(token)

    def on_finish(self, prompt: int) -> None:
        """No token follows in sequence `prompt`."""
        self._done.add(prompt)
        while self._now in self._done:
            self._end()

    def close(self) -> None:
        """End a sequence that has begun, so that readers of its text do not wait for ever."""
        if self._now < len(self._prompts):
            self._streamer.end()

    def _end(self) -> None:
        self._streamer.end()
        self._now += 1
        self._begin()

    def _begin(self) -> None:
        if self._now < len(self._prompts):
            self._streamer.put(np.array(self._prompts[self._now], np.int32))
            for token in self._waiting[self._now]:
                self._streamer.put(np.array([token], np.int32))
