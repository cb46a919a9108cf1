"""A request in the scheduler: queued, in prefill, or decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import BASE, Row
from lite_runner.config.generation import FinishReason
from lite_runner.generation.logprobs import LogprobCollector
from lite_runner.generation.request import Event, Finished, Request, Token


class Search(Protocol):
    """Chooses the tokens after a prompt. Each of its lanes needs a cache slot."""

    width: int  # lanes

    def begin(self, logits: NDArray[np.float32]) -> list[Event]: ...
    def newest(self) -> list[tuple[int, int, int]]: ...
    def advance(self, logits: NDArray[np.float32]) -> tuple[list[Event], list[tuple[int, int]]]: ...
    def lanes(self) -> list[int]: ...
    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]: ...


@dataclass(eq=False)
class Job:
    """A search and its progress. A request with more sequences than slots has several."""

    id: int
    order: tuple[int, int, int]  # queue order: priority, request id, part
    request: Request
    search: Search
    prompt_logprobs: LogprobCollector | None = None
    slots: list[int] = field(default_factory=list)  # cache slot per lane, once admitted
    adapter_slot: int = BASE
    source: int | None = None  # slot whose prefill will provide the prompt's prefix
    cached: int = 0  # prompt tokens reused from the prefix cache, now or later
    prefilled: int = 0  # prompt tokens in its first slot
    decoding: bool = False  # the prefill is complete

    @property
    def remaining(self) -> int:
        """Prompt tokens still to prefill."""
        return len(self.request.prompt) - self.prefilled

    def slots_in_use(self) -> list[int]:
        """Slots of the running lanes, and of the prefill."""
        lanes = self.search.lanes()
        if not self.decoding and lanes and lanes[0] != 0:
            lanes = [0, *lanes]
        return [self.slots[lane] for lane in lanes]

    def chunk(self, tokens: int) -> Row:
        """The next prefill chunk, of so many tokens."""
        prompt, end = self.request.prompt, self.prefilled + tokens
        logits = int(end == len(prompt)) if self.prompt_logprobs is None else tokens
        chunk = prompt[self.prefilled : end]
        return Row(self.slots[0], chunk, self.prefilled, self.adapter_slot, logits, len(prompt))

    def newest(self) -> list[Row]:
        """Decode rows: the newest token of every running lane."""
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

    def completed(self, events: Sequence[Event]) -> list[Event]:
        """Events of the search, the completions with prompt logprobs and cached tokens."""
        return [event if isinstance(event, Token) else self._whole(event) for event in events]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the running sequence `index`, or all (None)."""
        return [self._whole(event) for event in self.search.finish(reason, index)]

    def fill(self, tokens: int, logits: NDArray[np.float32]) -> list[Event]:
        """Account for a prefill chunk of so many tokens and the logits that `chunk` asked for."""
        prompt, start = self.request.prompt, self.prefilled
        self.prefilled += tokens
        if self.prompt_logprobs is not None:
            following = prompt[start + 1 : self.prefilled + 1]
            if len(following):
                self.prompt_logprobs.add(logits[: len(following)], following)
        if self.remaining:
            return []
        self.decoding = True
        return self.search.begin(logits[-1])

    def _whole(self, event: Finished) -> Finished:
        logprobs = None if self.prompt_logprobs is None else self.prompt_logprobs.all()
        cached = self.cached if self.source is None else 0
        completion = replace(event.completion, cached_tokens=cached, prompt_logprobs=logprobs)
        return replace(event, completion=completion)
