"""Decoding strategies: greedy search, sampling and beam search, and a request's progress in them.

Beam search follows transformers with early_stopping=False: scores are divided by
length ** length_penalty (eos counts), and the search ends when the best running beam, at its
current length, cannot beat the worst of num_beams finished ones. Repetition penalty and
min_new_tokens apply to log-probabilities.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BASE, BackendInfo, Row
from lite_runner.config.generation import FinishReason
from lite_runner.errors import RunnerError
from lite_runner.generation.request import Completion, Event, Finished, Request, Token
from lite_runner.generation.sampling import (
    Floats,
    LogprobCollector,
    Sampler,
    check_finite,
    log_softmax,
    process_logits,
    warped,
)
from lite_runner.records import dataclass

if TYPE_CHECKING:
    from lite_runner.generation.pooling import Pooled
    from lite_runner.generation.speculation import Drafter


@dataclass
class _Sequence:
    index: int
    sampler: Sampler
    logprobs: LogprobCollector | None
    drafter: Drafter | None
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end_token: int | None = None


class Samples:
    """Several completions of one prompt, drawn independently. A `DecodingStrategy`."""

    def __init__(
        self,
        id: int,
        request: Request,
        returns: Sequence[int],
        limit: int,
        *,
        drafter: Callable[[NDArray[np.int32]], Drafter] | None = None,
    ) -> None:
        """`returns`: indices of the sequences; `limit`: maximum tokens of each; `drafter`: makes
        the drafter of the tokens after the prompt."""
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
                None if drafter is None else drafter(request.prompt),
            )
            for index in returns
        ]
        self.width = len(returns)

    def begin(self, logits: NDArray[np.float32]) -> list[Event]:
        """Choose the first tokens from the prompt's last `logits` [vocab]."""
        events: list[Event] = []
        for sequence in self._running():
            if self._limit == 0:
                end = self._finished(sequence, "length")
                if self._request.keep_logits:
                    end = replace(end, completion=replace(end.completion, logits=logits))
                events.append(end)
            else:
                events += self._extended(sequence, logits[None], ())
        return events

    def tokens(self) -> list[tuple[int, list[int]]]:
        """(index, tokens) per running sequence, equally many each."""
        return [
            (index, sequence.tokens)
            for index, sequence in enumerate(self._sequences)
            if sequence.finish_reason is None
        ]

    def drafts(self, most: Callable[[float], int]) -> list[list[int]]:
        """Draft tokens for each running sequence; `most`: their number by the acceptance rate."""
        return [
            []
            if one.drafter is None
            else one.drafter.draft(min(most(one.drafter.rate), self._limit - len(one.tokens) - 1))
            for one in self._running()
        ]

    def advance(
        self, logits: NDArray[np.float32], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Event], list[tuple[int, int]]]:
        """Choose the next tokens from `logits` [n, vocab]: after the newest token of each running
        sequence and the drafted ones behind it. None is copied."""
        events: list[Event] = []
        at = 0
        for sequence, drafted in zip(self._running(), drafts, strict=True):
            end = at + 1 + len(drafted)
            events += self._extended(sequence, logits[at:end], drafted)
            at = end
        return events, []

    def running(self) -> list[int]:
        """Indices of the running sequences."""
        return [index for index, one in enumerate(self._sequences) if one.finish_reason is None]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the running sequence `index`, or all (None)."""
        ended = [one for one in self._running() if index is None or one.index == index]
        return [self._finished(sequence, reason) for sequence in ended]

    def _running(self) -> list[_Sequence]:
        return [sequence for sequence in self._sequences if sequence.finish_reason is None]

    def _extended(
        self, sequence: _Sequence, logits: NDArray[np.float32], drafted: Sequence[int]
    ) -> list[Event]:
        """Choose a token, and one more after each drafted token that was chosen."""
        events: list[Event] = []
        for row, draft in zip_longest(logits, drafted):
            events += self._next(sequence, row)
            if sequence.finish_reason is not None or sequence.tokens[-1] != draft:
                break
        sequence.drafts += bool(drafted)
        sequence.drafted += len(drafted)
        sequence.accepted += sum(isinstance(one, Token) for one in events[1:])
        if sequence.drafter is not None and sequence.finish_reason is None:
            sequence.drafter.extend(sequence.tokens[-len(events) :], len(drafted))
        return events

    def _next(self, sequence: _Sequence, logits: NDArray[np.float32]) -> list[Event]:
        try:
            token = sequence.sampler.choose(logits)
        except RunnerError as error:
            return [self._finished(sequence, "error", error)]
        likelihood = None
        if sequence.logprobs is not None:
            likelihood = sequence.logprobs.add(logits[None], np.array([token], np.int32))
        is_end = token in self._eos
        count = len(sequence.tokens) + 1
        event = Token(self._id, sequence.index, token, count, is_end, logprobs=likelihood)
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
            drafts=sequence.drafts,
            drafted_tokens=sequence.drafted,
            accepted_tokens=sequence.accepted,
            logprobs=logprobs,
        )
        return Finished(self._id, completion, error)


# Initial score of all beams but the first, which are its copies.
_UNLIKELY = -1e9


@dataclass(frozen=True)
class _Hypothesis:
    tokens: list[int]
    score: float
    finish_reason: FinishReason
    end_token: int | None = None


class Beams:
    """The beam search of one prompt. A `DecodingStrategy` with a sequence per beam."""

    def __init__(self, id: int, request: Request, limit: int) -> None:
        """`limit`: maximum tokens per completion."""
        self._id, self._request, self._limit = id, request, limit
        self._options = options = request.options
        self.width = options.num_beams
        self._eos = frozenset(options.eos_token_id)
        self._tokens: list[list[int]] = [[] for _ in range(self.width)]
        self._scores = np.full(self.width, _UNLIKELY)
        self._scores[0] = 0.0
        self._finished: list[_Hypothesis] = []  # best first, at most `width`
        self._done = False

    def begin(self, logits: NDArray[np.float32]) -> list[Event]:
        """Choose the first tokens from the prompt's last `logits` [vocab]."""
        return self.advance(np.broadcast_to(logits, (self.width, len(logits))))[0]

    def tokens(self) -> list[tuple[int, list[int]]]:
        """(index, tokens) per running beam, equally many each."""
        return [(index, self._tokens[index]) for index in self.running()]

    def drafts(self, most: Callable[[float], int]) -> list[list[int]]:
        """None: the text that a beam continues changes with each token."""
        return [[] for _ in self.running()]

    def advance(
        self, logits: NDArray[np.float32], drafts: Sequence[Sequence[int]] = ()
    ) -> tuple[list[Event], list[tuple[int, int]]]:
        """Choose the next beams from `logits` [num_beams, vocab]; also (parent, beam) for
        beams that continue another one."""
        try:
            parents = self._step(logits)
        except RunnerError as error:
            return [*self._ended(error)], []
        if self._done:
            return [*self._ended()], []
        return [], [(parent, beam) for beam, parent in enumerate(parents) if parent != beam]

    def running(self) -> list[int]:
        """Indices of the running beams: all, or none."""
        return [] if self._done else list(range(self.width))

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the search with the running beams. A single beam cannot be ended."""
        if self._done or index is not None:
            return []
        self._finished = [
            _Hypothesis(tokens, self._normalized(score, max(len(tokens), 1)), reason)
            for tokens, score in zip(self._tokens, self._scores, strict=True)
        ]
        return self._ended()

    def _ended(self, error: RunnerError | None = None) -> list[Finished]:
        """The best finished hypotheses."""
        self._done = True
        best = self._finished
        if error is not None:
            best = [_Hypothesis(tokens, 0.0, "error") for tokens in self._tokens]
        return [
            Finished(
                self._id,
                Completion(self._id, index, list(h.tokens), h.finish_reason, h.score, h.end_token),
                error,
            )
            for index, h in enumerate(best[: self._options.num_return_sequences])
        ]

    def _step(self, logits: Floats) -> list[int]:
        """Extend the beams by one token; the parent of each new beam."""
        vocab = logits.shape[1]
        totals = (self._log_probabilities(logits) + self._scores[:, None]).ravel()
        # Enough candidates that `width` of them are not eos.
        wanted = max(2, 1 + len(self._eos)) * self.width
        top = _best_first(totals, min(wanted, len(totals)))
        length = len(self._tokens[0]) + 1
        running: list[tuple[int, list[int], float]] = []
        for rank, index in enumerate(top.tolist()):
            parent, token = divmod(index, vocab)
            score = float(totals[index])
            at_eos = token in self._eos
            if not at_eos and length < self._limit:
                if len(running) < self.width:
                    running.append((parent, [*self._tokens[parent], token], score))
            elif rank < self.width:
                tokens = self._tokens[parent] if at_eos else [*self._tokens[parent], token]
                reason: FinishReason = "stop" if at_eos else "length"
                normalized, end = self._normalized(score, length), token if at_eos else None
                self._finish(_Hypothesis(tokens, normalized, reason, end))
        if not running or not self._can_improve(running, length):
            self._done = True
            return []
        self._tokens = [tokens for _, tokens, _ in running]
        self._scores = np.array([score for *_, score in running])
        return [parent for parent, *_ in running]

    def _log_probabilities(self, logits: Floats) -> Floats:
        generated = len(self._tokens[0])
        # The maximum is NaN if any value of the row is.
        for best in logits.max(axis=1):
            check_finite(best, generated, self._request.name)
        values = log_softmax(logits)
        rows = [
            process_logits(
                row,
                np.append(self._request.prompt, np.array(tokens, np.int32)),
                generated,
                self._options,
            )
            for row, tokens in zip(values, self._tokens, strict=True)
        ]
        return np.stack(rows, dtype=np.float64)

    def _finish(self, hypothesis: _Hypothesis) -> None:
        self._finished.append(hypothesis)
        self._finished.sort(key=lambda h: h.score, reverse=True)
        del self._finished[self.width :]

    def _can_improve(self, running: list[tuple[int, list[int], float]], length: int) -> bool:
        if len(self._finished) < self.width:
            return True
        return self._normalized(running[0][2], length) > self._finished[-1].score

    def _normalized(self, score: float, length: int) -> float:
        return float(score / length**self._options.length_penalty)


def _best_first(values: Floats, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest, largest first."""
    top = np.argpartition(values, -count)[-count:] if count < len(values) else None
    ids: NDArray[np.intp] = np.arange(len(values)) if top is None else np.sort(top)
    return ids[np.argsort(-values[ids], kind="stable")]


class DecodingStrategy(Protocol):
    """Chooses the tokens after a prompt. Each of its sequences needs a cache slot."""

    width: int  # sequences

    def begin(self, logits: NDArray[np.float32]) -> list[Event]: ...
    def tokens(self) -> list[tuple[int, list[int]]]: ...
    def drafts(self, most: Callable[[float], int]) -> list[list[int]]: ...
    def advance(
        self, logits: NDArray[np.float32], drafts: Sequence[Sequence[int]]
    ) -> tuple[list[Event], list[tuple[int, int]]]: ...
    def running(self) -> list[int]: ...
    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]: ...


def strategies_of(
    id: int,
    request: Request,
    info: BackendInfo,
    drafter: Callable[[NDArray[np.int32]], Drafter] | None,
) -> Sequence[DecodingStrategy]:
    """The strategies of a request: with more sequences than slots, one per full set of slots."""
    options, slots = request.options, info.slots
    length = len(request.prompt)
    limit = options.max_sequence(length, info.max_length) - length
    if request.pooling is not None:
        from lite_runner.generation.pooling import Pooled

        return [Pooled(id, request)]
    if options.num_beams > 1:
        return [Beams(id, request, limit)]
    if info.memory is not None:
        first, second = (info.memory.blocks_of(length + limit, n, length) for n in (1, 2))
        slots = min(slots, 1 + (info.memory.blocks - first) // max(1, second - first))
    returns = range(options.num_return_sequences)
    parts = [returns[start : start + slots] for start in range(0, len(returns), slots)]
    return [Samples(id, request, part, limit, drafter=drafter) for part in parts]


@dataclass(eq=False)
class SequenceGroup:
    """A strategy and its progress. A request with more sequences than slots has several."""

    id: int
    order: tuple[int, int, int]  # queue order: priority, request id, part
    request: Request
    strategy: DecodingStrategy
    shares_prompt: bool  # its slots may be copied where texts are prefilled again
    prompt_logprobs: LogprobCollector | None = None
    slots: list[int] = field(default_factory=list)  # cache slot per sequence, once admitted
    adapter_slot: int = BASE
    source: int | None = None  # slot whose prefill will provide the prompt's prefix
    cached: int = 0  # prompt tokens reused from the prefix cache, now or later
    # Texts to prefill by sequence: the prompt in the first one's slot; later, in that of every
    # running sequence, what has outgrown its keys.
    texts: list[tuple[int, NDArray[np.int32]]] = field(init=False)
    prefilled: int = 0  # tokens of the first text that are in its slot
    begun: bool = False  # the prompt's prefill is complete
    preempted: bool = False  # waits to be recomputed
    queued: float = field(default_factory=time.perf_counter)
    admitted: float | None = None  # when it got its slots
    _logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # after later texts

    def __post_init__(self) -> None:
        self.texts = [(0, self.request.prompt)]

    @property
    def decoding(self) -> bool:
        """True if there is nothing to prefill."""
        return not self.texts

    @property
    def filling(self) -> list[int]:
        """Slots of the texts to prefill."""
        return [self.slots[index] for index, _ in self.texts]

    @property
    def remaining(self) -> int:
        """Tokens of the first text still to prefill."""
        return len(self.texts[0][1]) - self.prefilled

    @property
    def scored(self) -> LogprobCollector | None:
        """Collects log-probabilities of the prompt during prefill."""
        return None if self.begun else self.prompt_logprobs

    @property
    def cached_tokens(self) -> int:
        if not self.decoding:
            return self.prefilled
        length = len(self.request.prompt) - 1
        return sum(length + len(tokens) for _, tokens in self.strategy.tokens())

    def in_use(self) -> list[int]:
        """The running sequences, and those of the prefill."""
        running = self.strategy.running()
        return sorted({*running, *(index for index, _ in self.texts)}) if running else []

    def slots_in_use(self) -> list[int]:
        """Slots of the running sequences, and of the prefill."""
        return [self.slots[index] for index in self.in_use()]

    @property
    def unscored(self) -> int:
        """Leading tokens of the next prefill whose logits are not scored."""
        return max(0, self.request.scored_from - 1 - self.prefilled)

    def chunk(self, tokens: int) -> Row:
        """The next prefill chunk, of so many tokens."""
        text, end = self.texts[0][1], self.prefilled + tokens
        logits, pooling = int(end == len(text)), self.request.pooling
        if self.scored is not None:
            logits = max(logits, tokens - self.unscored)
        elif pooling == "mean":
            logits = tokens
        chunk, place = text[self.prefilled : end], self.adapter_slot
        hidden = pooling is not None
        return Row(self.filling[0], chunk, self.prefilled, place, logits, len(text), hidden)

    def newest(self, most: Callable[[float], int] | None = None) -> list[Row]:
        """Decode rows: the newest token of every running sequence, and with `most` the tokens that
        its strategy drafts."""
        length = len(self.request.prompt) - 1
        texts = self.strategy.tokens()
        drafts = [[] for _ in texts] if most is None else self.strategy.drafts(most)
        return [
            Row(
                self.slots[index],
                np.array([*tokens[-1:], *drafted], np.int32),
                length + len(tokens),
                self.adapter_slot,
                1 + len(drafted),
                drafts=bool(drafted),
            )
            for (index, tokens), drafted in zip(texts, drafts, strict=True)
        ]

    def outgrows(self, length: int | None) -> bool:
        """True if its texts have just grown beyond `length` tokens; all have as many."""
        if length is None or not self.decoding:
            return False
        return any(
            len(self.request.prompt) + len(tokens) == length + 1
            for _, tokens in self.strategy.tokens()
        )

    def restart(self) -> None:
        """Prefill the texts of all running sequences from their first token on."""
        prompt = self.request.prompt
        self.texts = [
            (index, np.concatenate([prompt, np.array(tokens, np.int32)]))
            for index, tokens in self.strategy.tokens()
        ]

    def preempt(self) -> None:
        """Give up the slots, until `resume`."""
        self.slots, self.source, self.prefilled, self.preempted = [], None, 0, True
        self._logits.clear()
        if self.request.pooling is not None:
            cast("Pooled", self.strategy).restart()
        top = self.request.options.prompt_logprobs
        if top is not None and not self.begun:
            self.prompt_logprobs = LogprobCollector(top)

    def resume(self) -> None:
        """Recompute the contents of the slots, once it has some."""
        if self.begun:
            self.restart()

    def completed(self, events: Sequence[Event]) -> list[Event]:
        """Events of the strategy, the completions with prompt logprobs and cached tokens."""
        return [event if isinstance(event, Token) else self._whole(event) for event in events]

    def finish(self, reason: FinishReason, index: int | None = None) -> list[Finished]:
        """End the running sequence `index`, or all (None)."""
        return [self._whole(event) for event in self.strategy.finish(reason, index)]

    def fill(
        self, tokens: int, logits: NDArray[np.float32]
    ) -> tuple[list[Event], list[tuple[int, int]]]:
        """Account for a prefill chunk of so many tokens and the logits, or hidden states, that
        `chunk` asked for. Events, and copies as of DecodingStrategy.advance."""
        (index, text), start = self.texts[0], self.prefilled + self.unscored
        self.prefilled += tokens
        if self.request.pooling is not None and len(logits):
            cast("Pooled", self.strategy).add(logits)
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
            events = [self._first(event) for event in self.strategy.begin(logits[-1])]
            return events, [(0, index) for index in self.strategy.running() if index]
        self._logits[index] = logits[-1]
        if self.texts and self.shares_prompt:
            self.prefilled = len(self.request.prompt)
            return [], [(index, self.texts[0][0])]
        if self.texts:
            return [], []
        found = np.stack([self._logits[index] for index in self.strategy.running()])
        self._logits.clear()
        return self.strategy.advance(found, [()] * len(found))

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
