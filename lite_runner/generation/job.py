"""A request in the scheduler: queued, in prefill, or decoding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import BASE, Row
from lite_runner.config.generation import FinishReason
from lite_runner.generation.logprobs import LogprobCollector
from lite_runner.generation.request import Event, Finished, Request, Token
from lite_runner.records import dataclass


class Search(Protocol):
    """Chooses the tokens after a prompt. Each of its lanes needs a cache slot."""

    width: int  # lanes

    def begin(self, logits: NDArray[np.float32]) -> list[Event]: ...
    def tokens(self) -> list[tuple[int, list[int]]]: ...
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
    # Texts to prefill by lane: the prompt in the first one's slot; later, in every running lane's,
    # what has outgrown its keys.
    texts: list[tuple[int, NDArray[np.int32]]] = field(init=False)
    prefilled: int = 0  # tokens of the first of them in its slot
    begun: bool = False  # the prompt's prefill is complete
    queued: float = field(default_factory=time.perf_counter)
    admitted: float | None = None  # when it got its slots
    _logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # after later texts

    def __post_init__(self) -> None:
        self.texts = [(0, self.request.prompt)]

    @property
    def decoding(self) -> bool:
        """Whether there is nothing to prefill."""
        return not self.texts

    @property
    def filling(self) -> list[int]:
        """Slots of the texts to prefill."""
        return [self.slots[lane] for lane, _ in self.texts]

    @property
    def remaining(self) -> int:
        """Tokens of the first text still to prefill."""
        return len(self.texts[0][1]) - self.prefilled

    @property
    def scored(self) -> LogprobCollector | None:
        """Gets the log-probabilities of what is prefilled."""
        return None if self.begun else self.prompt_logprobs

    @property
    def cached_tokens(self) -> int:
        """Tokens of its sequences in the KV cache."""
        if not self.decoding:
            return self.prefilled
        length = len(self.request.prompt) - 1
        return sum(length + len(tokens) for _, tokens in self.search.tokens())

    def slots_in_use(self) -> list[int]:
        """Slots of the running lanes, and of the prefill."""
        running = self.search.lanes()
        lanes = {*running, *(lane for lane, _ in self.texts)} if running else ()
        return [self.slots[lane] for lane in sorted(lanes)]

    def chunk(self, tokens: int) -> Row:
        """The next prefill chunk, of so many tokens."""
        text, end = self.texts[0][1], self.prefilled + tokens
        logits = int(end == len(text)) if self.scored is None else tokens
        chunk = text[self.prefilled : end]
        return Row(self.filling[0], chunk, self.prefilled, self.adapter_slot, logits, len(text))

    def newest(self) -> list[Row]:
        """Decode rows: the newest token of every running lane."""
        length = len(self.request.prompt) - 1
        return [
            Row(
                self.slots[lane],
                np.array(tokens[-1:], np.int32),
                length + len(tokens),
                self.adapter_slot,
            )
            for lane, tokens in self.search.tokens()
        ]

    def outgrows(self, length: int | None) -> bool:
        """Whether its texts have just grown beyond `length` tokens; all have as many."""
        if length is None or not self.decoding:
            return False
        return any(
            len(self.request.prompt) + len(tokens) == length + 1
            for _, tokens in self.search.tokens()
        )

    def restart(self) -> None:
        """Prefill the texts of all running lanes from their first token on."""
        prompt = self.request.prompt
        self.texts = [
            (lane, np.concatenate([prompt, np.array(tokens, np.int32)]))
            for lane, tokens in self.search.tokens()
        ]

    def completed(self, events: Sequence[Event]) -> list[Event]:
        """Events of the search, the completions with prompt logprobs and cached tokens."""
        return [event if isinstance(event, Token) else self._whole(event) for event in events]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the running sequence `index`, or all (None)."""
        return [self._whole(event) for event in self.search.finish(reason, index)]

    def fill(
        self, tokens: int, logits: NDArray[np.float32]
    ) -> tuple[list[Event], list[tuple[int, int]]]:
        """Account for a prefill chunk of so many tokens and the logits that `chunk` asked for.
        Events, and (lane, lane) copies as of Search.advance."""
        (lane, text), start = self.texts[0], self.prefilled
        self.prefilled += tokens
        if self.scored is not None:
            following = text[start + 1 : self.prefilled + 1]
            if len(following):
                self.scored.add(logits[: len(following)], following)
        if self.remaining:
            return [], []
        self.prefilled = 0
        del self.texts[0]
        if not self.begun:
            self.begun = True
            events = [self._first(event) for event in self.search.begin(logits[-1])]
            return events, [(0, lane) for lane in self.search.lanes() if lane]
        self._logits[lane] = logits[-1]
        if self.texts:
            return [], []
        found = np.stack([self._logits[lane] for lane in self.search.lanes()])
        self._logits.clear()
        return self.search.advance(found)

    def _first(self, event: Event) -> Event:
        """An event of the first token, with the prompt's log-probabilities."""
        if self.prompt_logprobs is None or not isinstance(event, Token):
            return event
        return replace(event, prompt_logprobs=self.prompt_logprobs.all())

    def _whole(self, event: Finished) -> Finished:
        logprobs = None if self.prompt_logprobs is None else self.prompt_logprobs.all()
        cached = self.cached if self.source is None else 0
        waited = (self.admitted or time.perf_counter()) - self.queued
        completion = replace(
            event.completion, cached_tokens=cached, prompt_logprobs=logprobs, waited_s=waited
        )
        return replace(event, completion=completion)
