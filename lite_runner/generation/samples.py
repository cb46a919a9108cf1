"""Greedy search and sampling: independent completions of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason
from lite_runner.errors import RunnerError
from lite_runner.generation.logprobs import LogprobCollector
from lite_runner.generation.request import (
    Completion,
    Event,
    Finished,
    Request,
    Token,
)
from lite_runner.generation.sampling import Sampler, warped
from lite_runner.records import dataclass


@dataclass
class _Sequence:
    index: int
    sampler: Sampler
    logprobs: LogprobCollector | None
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end_token: int | None = None


class Samples:
    """Several completions of one prompt, drawn independently. A `Search` of the scheduler."""

    def __init__(self, id: int, request: Request, returns: Sequence[int], limit: int) -> None:
        """`returns`: indices of the sequences; `limit`: maximum tokens of each."""
        self._id, self._request, self._limit = id, request, limit
        self._eos = frozenset(request.options.eos_token_id)
        top = request.options.logprobs
        self._sequences = [
            _Sequence(
                index,
                Sampler(
                    request.options,
                    request.prompt,
                    (*request.seed_key, index),
                    request.name,
                    request.adjustments,
                    keep_scores=request.keep_logits,
                ),
                None if top is None else LogprobCollector(top),
            )
            for index in returns
        ]
        self.width = len(returns)

    def begin(self, logits: NDArray[np.float32]) -> list[Event]:
        """Choose the first tokens from the prompt's last `logits` [vocab]."""
        events: list[Event] = []
        for sequence in self._running():
            if self._limit == 0:
                events.append(self._finished(sequence, "length"))
            else:
                events += self._extended(sequence, logits)
        return events

    def tokens(self) -> list[tuple[int, list[int]]]:
        """(lane, tokens) per running sequence, equally many each."""
        return [
            (lane, sequence.tokens)
            for lane, sequence in enumerate(self._sequences)
            if sequence.finish_reason is None
        ]

    def advance(self, logits: NDArray[np.float32]) -> tuple[list[Event], list[tuple[int, int]]]:
        """Choose the next tokens from `logits` [running sequences, vocab]; no lane is copied."""
        events: list[Event] = []
        for sequence, row in zip(self._running(), logits, strict=True):
            events += self._extended(sequence, row)
        return events, []

    def lanes(self) -> list[int]:
        """Running lanes."""
        return [lane for lane, one in enumerate(self._sequences) if one.finish_reason is None]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the running sequence `index`, or all (None)."""
        ended = [one for one in self._running() if index is None or one.index == index]
        return [self._finished(sequence, reason) for sequence in ended]

    def _running(self) -> list[_Sequence]:
        return [sequence for sequence in self._sequences if sequence.finish_reason is None]

    def _extended(self, sequence: _Sequence, logits: NDArray[np.float32]) -> list[Event]:
        try:
            token = sequence.sampler.choose(logits)
        except RunnerError as error:
            return [self._finished(sequence, "error", error)]
        likelihood = None
        if sequence.logprobs is not None:
            likelihood = sequence.logprobs.add(logits[None], np.array([token], np.int32))
        is_end = token in self._eos
        event = Token(self._id, sequence.index, token, is_end, logprobs=likelihood)
        if self._request.keep_logits:
            scores = warped(sequence.sampler.scores, self._request.options)
            event = replace(event, logits=logits, scores=scores)
        if is_end:
            sequence.end_token = token
            return [event, self._finished(sequence, "stop")]
        sequence.tokens.append(token)
        if len(sequence.tokens) < self._limit:
            return [event]
        return [event, self._finished(sequence, "length")]

    def _finished(
        self, sequence: _Sequence, reason: FinishReason, error: RunnerError | None = None
    ) -> Finished:
        sequence.finish_reason = reason
        logprobs = None if sequence.logprobs is None else sequence.logprobs.all()
        completion = Completion(
            self._id,
            sequence.index,
            list(sequence.tokens),
            reason,
            end_token=sequence.end_token,
            logprobs=logprobs,
        )
        return Finished(self._id, completion, error)
