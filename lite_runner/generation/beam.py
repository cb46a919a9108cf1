"""Beam search: the best completions of one prompt by total log-probability.

The rules are those of transformers with early_stopping=False: scores are divided by
length ** length_penalty (eos counts), and the search ends when the best running beam, at its
current length, cannot beat the worst of num_beams finished ones. Repetition penalty and
min_new_tokens apply to log-probabilities.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason
from lite_runner.errors import RunnerError
from lite_runner.generation.request import Completion, Event, Finished, Request
from lite_runner.generation.sampling import Floats, check_finite, log_softmax, process_logits
from lite_runner.records import dataclass

# Initial score of all beams but the first, which are its copies.
_UNLIKELY = -1e9


@dataclass(frozen=True)
class _Hypothesis:
    tokens: list[int]
    score: float
    finish_reason: FinishReason
    end_token: int | None = None


class Beams:
    """The beam search of one prompt. A `Search` of the scheduler, with a lane per beam."""

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
        events, _ = self.advance(np.broadcast_to(logits, (self.width, len(logits))))
        return events

    def tokens(self) -> list[tuple[int, list[int]]]:
        """(lane, tokens) per running beam, equally many each."""
        return [(lane, self._tokens[lane]) for lane in self.lanes()]

    def advance(self, logits: NDArray[np.float32]) -> tuple[list[Event], list[tuple[int, int]]]:
        """Choose the next beams from `logits` [num_beams, vocab]; also (parent lane, lane) for
        beams that continue another one."""
        try:
            parents = self._step(logits)
        except RunnerError as error:
            return [*self._ended(error)], []
        if self._done:
            return [*self._ended()], []
        return [], [(parent, beam) for beam, parent in enumerate(parents) if parent != beam]

    def lanes(self) -> list[int]:
        """Running lanes: all, or none."""
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
