"""A request on its way through the scheduler: in line, its prompt being computed, its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import BASE, Row
from lite_runner.config.generation import FinishReason
from lite_runner.generation.logprobs import Places
from lite_runner.generation.request import Event, Finished, Request, Token


class Search(Protocol):
    """Which tokens follow a prompt. Each of its lanes needs a cache slot."""

    width: int  # lanes

    def begin(self, logits: NDArray[np.float32]) -> list[Event]: ...
    def newest(self) -> list[tuple[int, int, int]]: ...
    def advance(self, logits: NDArray[np.float32]) -> tuple[list[Event], list[tuple[int, int]]]: ...
    def lanes(self) -> list[int]: ...
    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]: ...


@dataclass(eq=False)
class Job:
    """A search, and how far it is. A request with more sequences than slots has several."""

    id: int
    order: tuple[int, int, int]  # by which it stands in line: priority, request, part
    request: Request
    search: Search
    prompt_logprobs: Places | None = None
    slots: list[int] = field(default_factory=list)  # of its lanes, from when it leaves the line
    adapter_slot: int = BASE
    source: int | None = None  # the slot that is about to hold the beginning of the prompt
    cached: int = 0  # tokens of the prompt that were, or will be, taken from another text
    filled: int = 0  # tokens of the prompt that are in its first slot
    begun: bool = False  # the prompt is computed

    @property
    def left(self) -> int:
        """Tokens of the prompt that are still to be computed."""
        return len(self.request.prompt) - self.filled

    def slots_in_use(self) -> list[int]:
        """Of the lanes that go on, and the one that the prompt is computed in."""
        lanes = self.search.lanes()
        if not self.begun and lanes and lanes[0] != 0:
            lanes = [0, *lanes]
        return [self.slots[lane] for lane in lanes]

    def chunk(self, tokens: int) -> Row:
        """The next so many tokens of the prompt."""
        prompt, end = self.request.prompt, self.filled + tokens
        logits = int(end == len(prompt)) if self.prompt_logprobs is None else tokens
        piece = prompt[self.filled : end]
        return Row(self.slots[0], piece, self.filled, self.adapter_slot, logits, len(prompt))

    def newest(self) -> list[Row]:
        """The newest token of every lane that goes on."""
        length = len(self.request.prompt) - 1
        return [
            Row(
                self.slots[lane],
                np.array([token], np.int32),
                length + generated,
                self.adapter_slot,
            )
            for lane, token, generated in self.search.newest()
        ]

    def told(self, events: Sequence[Event]) -> list[Event]:
        """Events of the search, the completions with what is known of the prompt."""
        return [event if isinstance(event, Token) else self._whole(event) for event in events]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the sequence with the number `index`, or all (None), as far as they go on."""
        return [self._whole(event) for event in self.search.finish(reason, index)]

    def fill(self, tokens: int, logits: NDArray[np.float32]) -> list[Event]:
        """So many tokens of the prompt were computed, with the logits that `chunk` asked for."""
        prompt, start = self.request.prompt, self.filled
        self.filled += tokens
        if self.prompt_logprobs is not None:
            following = prompt[start + 1 : self.filled + 1]
            if len(following):
                self.prompt_logprobs.add(logits[: len(following)], following)
        if self.left:
            return []
        self.begun = True
        return self.search.begin(logits[-1])

    def _whole(self, event: Finished) -> Finished:
        logprobs = None if self.prompt_logprobs is None else self.prompt_logprobs.all()
        cached = self.cached if self.source is None else 0
        completion = replace(event.completion, cached_tokens=cached, prompt_logprobs=logprobs)
        return replace(event, completion=completion)
