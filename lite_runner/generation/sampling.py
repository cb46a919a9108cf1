"""Logits processing, sampling and log-probabilities, in the usual order of logits processors.

Repetition penalty, min_new_tokens; then, when sampling, temperature, top-k, top-p, min-p, softmax
and a draw. All take one row of float32 logits [vocab] and do not modify it. Each matches the
transformers processor of that name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import Backend, Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import NonFiniteError
from lite_runner.generation.request import Adjustments, Completion, Logprobs

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

_PRECISION = "try another precision: model.model_config.compute_dtype=float32 kv_cache=fp32"
# Only the few tokens near the maximum need sorting.
_COLUMNS = 1024  # columns used to bound the k-th largest; see _near_largest
_SLACK = 1.0  # by which the k-th largest may be smaller than that of the token before
_MARGINS = (2.0, 4.0, 6.0, 9.0, 13.0, np.inf)  # distances from the maximum tried by _nucleus


class Sampler:
    """Samples the tokens of one sequence.

    Each sequence has its own random generator, so results do not depend on the batch or on
    scheduling.
    """

    def __init__(
        self,
        options: GenerationConfig,
        prompt: Ids,
        seed_key: Sequence[int],
        name: str = "",
        adjustments: Adjustments | None = None,
        *,
        keep_scores: bool = False,
    ) -> None:
        """`seed_key` seeds the draws; `name`: of the prompt, for messages; `keep_scores`: set
        `scores` with each token."""
        self._options = options
        self._seen = Seen(prompt, options.pad_token_id)
        self._chosen = 0
        self._name = name
        penalized = options.presence_penalty or options.frequency_penalty
        asked = adjustments or (Adjustments() if penalized else None)
        self._adjuster = None if asked is None else Adjuster(asked, options)
        self._random = np.random.default_rng(list(seed_key)) if options.do_sample else None
        self._keep_scores = keep_scores
        self._top = TopK(options.top_k)
        self.scores: Floats = np.zeros(0, np.float32)  # the last logits, processed [vocab]

    def choose(self, logits: Floats) -> int:
        """The next token. Raises NonFiniteError for non-finite `logits`."""
        if self._adjuster is not None:
            logits = self._adjuster.apply(logits)
        changed = changed_logits(logits, self._seen.ids, self._chosen, self._options)
        if self._keep_scores or (changed is not None and not logits.flags.writeable):
            self.scores = scores = _with(logits, changed)
            token = self._token(scores)
        elif changed is None:
            token = self._token(logits)
        else:
            # Changed in place and restored: copying the vocabulary would cost more than all else.
            ids, values = changed
            before = logits[ids]
            logits[ids] = values
            try:
                token = self._token(logits)
            finally:
                logits[ids] = before
        self._chosen += 1
        if self._adjuster is not None:
            self._adjuster.take(token)
        if self._options.repetition_penalty != 1.0:
            self._seen.add(token)
        return token

    def _token(self, scores: Floats) -> int:
        best = int(scores.argmax())  # NaN counts as the maximum
        check_finite(scores[best], self._chosen, self._name)
        if self._random is None:
            return best
        return draw(scores, self._options, self._random, self._top)


class Adjuster:
    """Adjusts the scores of one sequence. Penalties count generated tokens, not the prompt's."""

    def __init__(self, adjustments: Adjustments, options: GenerationConfig) -> None:
        self._presence = np.float32(options.presence_penalty)
        self._frequency = np.float32(options.frequency_penalty)
        self._counts: dict[int, int] = {}  # of generated tokens, where there are penalties
        bias = dict(adjustments.logit_bias)
        self._biased = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._guide = None if adjustments.guide is None else adjustments.guide()

    def apply(self, logits: Floats) -> Floats:
        """Adjusted logits [vocab]; `logits` stay as they are."""
        scores = logits.copy()
        scores[self._biased] += self._bias
        if self._counts:
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            scores[ids] -= self._presence + self._frequency * counts
        if self._guide is not None:
            self._guide.mask(scores)
        return scores

    def take(self, token: int) -> None:
        """The token that was chosen."""
        if self._presence or self._frequency:
            self._counts[token] = self._counts.get(token, 0) + 1
        if self._guide is not None:
            self._guide.take(token)


class Seen:
    """The tokens of a sequence, each once, without the one that pads."""

    def __init__(self, prompt: Ids, pad: int | None) -> None:
        self._known = {int(token) for token in prompt} - {pad}
        self._pad = pad
        self.ids: Ids = np.array(sorted(self._known), np.intp)

    def add(self, token: int) -> None:
        if token not in self._known and token != self._pad:
            self._known.add(token)
            self.ids = np.append(self.ids, np.intp(token))


def check_finite(best: np.floating[Any], step: int, name: str) -> None:
    """Raise NonFiniteError if the maximum score of a row is not finite."""
    if not math.isfinite(best):
        what = "NaN" if np.isnan(best) else f"no finite value (the largest is {best})"
        raise NonFiniteError(
            f"the model's logits hold {what} at step {step} of {name or 'the prompt'}",
            hint=_PRECISION,
        )


def nonfinite_hidden(name: str) -> NonFiniteError:
    """The error of an embedding that is not finite."""
    return NonFiniteError(f"the model's hidden states of {name} are not finite", hint=_PRECISION)


def process_logits(logits: Floats, seen: Ids, generated: int, config: GenerationConfig) -> Floats:
    """Logits after repetition penalty and min_new_tokens.

    `seen`: ids of prompt and generated tokens, repeats allowed; `generated`: number of new tokens.
    Returns `logits` itself if nothing applies.
    """
    if config.pad_token_id is not None:
        seen = seen[seen != config.pad_token_id]
    return _with(logits, changed_logits(logits, seen, generated, config))


def changed_logits(
    logits: Floats, seen: Ids, generated: int, config: GenerationConfig
) -> tuple[Ids, Floats] | None:
    """The ids whose logits repetition penalty and min_new_tokens change, and the new values; of a
    repeated id the last one applies. None where nothing applies."""
    penalized = config.repetition_penalty != 1.0
    too_short = generated < config.min_new_tokens and bool(config.eos_token_id)
    if not (penalized or too_short):
        return None
    ids: Ids = seen if penalized else seen[:0]
    values = logits[ids]
    penalty = config.repetition_penalty
    values = np.where(values < 0, values * penalty, values / penalty)
    if too_short:
        # A config's eos id may be outside the vocabulary.
        ends = [token for token in config.eos_token_id if token < len(logits)]
        ids = np.concatenate([ids, np.array(ends, np.intp)])
        values = np.concatenate([values, np.full(len(ends), -np.inf, values.dtype)])
    return ids, values


def _with(logits: Floats, changed: tuple[Ids, Floats] | None) -> Floats:
    if changed is None:
        return logits
    scores = logits.copy()
    scores[changed[0]] = changed[1]
    return scores


def draw(
    scores: Floats, config: GenerationConfig, random: np.random.Generator, top: TopK | None = None
) -> int:
    """Sample a token from `scores` with temperature, top_k, top_p and min_p; `top`: of the sequence
    that it is drawn for."""
    ids, weights = candidates(scores, config, top)
    cumulative = weights.astype(np.float64).cumsum()
    point = random.random() * cumulative[-1]
    # Rounding may put the point at the end.
    index = min(int(cumulative.searchsorted(point, side="right")), len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def candidates(
    scores: Floats, config: GenerationConfig, top: TopK | None = None
) -> tuple[Ids | None, Floats]:
    """Candidate ids (None: all) and their unnormalized probabilities."""
    ids: Ids | None = None
    if 0 < config.top_k < len(scores):
        ids, scores = (top or TopK(config.top_k)).largest(scores)
    # Relative to the maximum, whose weight is 1; overflow is only towards -inf, a weight of 0.
    with np.errstate(over="ignore"):
        weights = scores - scores.max()
        weights /= np.float32(max(config.temperature, 1e-30))
        np.exp(weights, out=weights)
    if config.top_p < 1.0:
        kept = _nucleus(weights, config.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if config.min_p > 0.0:
        kept = np.flatnonzero(weights >= config.min_p * weights.max())
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def warped(scores: Floats, config: GenerationConfig) -> Floats:
    """Warped logits [vocab]: divided by the temperature, -inf for non-candidates.

    Unchanged without sampling.
    """
    if not config.do_sample:
        return scores
    ids, _ = candidates(scores, config)
    kept = slice(None) if ids is None else ids
    result = np.full_like(scores, -np.inf)
    with np.errstate(over="ignore"):
        result[kept] = scores[kept] / np.float32(max(config.temperature, 1e-30))
    return result


class TopK:
    """Finds the largest scores of each token of a sequence; those of the token before bound the
    search."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._least: float | None = None  # the last of them, in the token before

    def largest(self, scores: Floats) -> tuple[Ids, Floats]:
        """Indices of the `count` largest, and of ties with the last of them, ascending; and these
        scores."""
        ids: Ids | None = None
        if self._least is not None:
            ids = np.flatnonzero(scores >= self._least - _SLACK)
        if ids is None or len(ids) < self._count:
            ids = _near_largest(scores, self._count)
        near = scores[ids]
        least = _last_of_best(near, self._count)
        self._least = float(least)
        kept = near >= least
        return ids[kept], near[kept]


def _near_largest(scores: Floats, count: int) -> Ids:
    """Indices of the `count` largest, of ties with the last of them, and of a few more."""
    laid_out = len(scores) - len(scores) % _COLUMNS
    if not count <= _COLUMNS <= laid_out:
        return np.flatnonzero(scores >= _last_of_best(scores, count))
    # The `count` best columns each have a score of at least the smallest of their maxima.
    best = scores[:laid_out].reshape(-1, _COLUMNS).max(axis=0)
    return np.flatnonzero(scores >= _last_of_best(best, count))


def _last_of_best(scores: Floats, count: int) -> np.floating[Any]:
    """The smallest of the `count` largest."""
    last: np.floating[Any] = np.partition(scores, -count)[-count]
    return last


def _nucleus(weights: Floats, share: float) -> Ids:
    """Indices of the smallest set of largest weights with `share` of the sum, at least one."""
    wanted = share * weights.sum(dtype=np.float64)
    if len(weights) <= _COLUMNS:
        ids: Ids = np.argsort(-weights, kind="stable")
    else:
        for margin in _MARGINS:
            ids = np.flatnonzero(weights >= np.exp(-margin))
            if weights[ids].sum(dtype=np.float64) >= wanted:
                break
        ids = ids[np.argsort(-weights[ids], kind="stable")]
    cumulative = weights[ids].astype(np.float64).cumsum()
    return ids[: int(cumulative.searchsorted(wanted, side="left")) + 1]


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of `logits` along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


BLOCK_BYTES = 8 << 20  # logits processed at a time, to stay in the CPU cache


class LogprobCollector:
    """Collects the log-probabilities of one sequence."""

    def __init__(self, top: int) -> None:
        """`top`: number of most likely tokens to keep per position."""
        self._top = top
        self._parts: list[tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]] = []

    def add(self, logits: NDArray[np.float32], tokens: NDArray[np.int32]) -> Logprobs:
        """Add `tokens` [n], predicted by `logits` [n, vocab]."""
        part = log_likelihoods(logits, tokens, self._top)
        self._parts.append(part)
        return Logprobs(*part)

    def all(self) -> Logprobs:
        """The log-probabilities of all tokens so far."""
        if not self._parts:
            none = np.zeros((0, self._top))
            return Logprobs(np.zeros(0), none.astype(np.int32), none)
        chosen, ids, top = zip(*self._parts, strict=True)
        return Logprobs(np.concatenate(chosen), np.concatenate(ids), np.concatenate(top))


def logprobs_of(completion: Completion) -> list[dict[str, Any]] | None:
    """JSON form for the drawn tokens: id, log-probability (None if not finite), and [id,
    log-probability] of the most likely tokens at each position."""
    found = completion.logprobs
    return None if found is None else _plain(found, completion.drawn)


def prompt_logprobs_of(
    completion: Completion, prompt: Sequence[int]
) -> list[dict[str, Any] | None] | None:
    """The log-probabilities of the prompt's tokens computed so far; None for the first, which
    nothing predicts."""
    found = completion.prompt_logprobs
    return None if found is None else [None, *_plain(found, prompt[1:])]


def _plain(found: Logprobs, tokens: Sequence[int]) -> list[dict[str, Any]]:
    parts = (part.tolist() for part in (found.chosen, found.top_ids, found.top))
    return [
        {
            "token": int(token),
            "logprob": _finite(chosen),
            "top": [[id, _finite(value)] for id, value in zip(ids, values, strict=True)],
        }
        for token, chosen, ids, values in zip(tokens, *parts, strict=False)
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def logits_of_text(backend: Backend, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
    """Base-model logits after each of `tokens` [n], in chunks [k, vocab], from a backend with
    `most_logits`. Overwrites slot 0."""
    step = backend.info.most_logits
    for start in range(0, len(tokens), step):
        part = tokens[start : start + step]
        yield backend.forward([Row(0, part, start, logits=len(part), length=len(tokens))])


def log_likelihoods(
    logits: NDArray[np.float32], following: NDArray[np.int32], top: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
    """Natural log-softmax of logits [n, vocab] at the tokens `following` [n]; and ids [n, k] and
    log-probabilities [n, k] of the `top` k tokens, most likely first.

    Max subtraction and exp are float32, the sum is float64. Non-finite logits give NaN. Memory is
    bounded by a block.
    """
    count, vocab = logits.shape
    top = min(top, vocab)
    found, ids, best = np.empty(count), np.empty((count, top), np.int32), np.empty((count, top))
    step = max(1, BLOCK_BYTES // (4 * vocab))
    for start in range(0, count, step):
        here = slice(start, start + step)
        block = logits[here]
        with np.errstate(invalid="ignore"):  # inf - inf
            shifted = block - block.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(shifted, following[here, None], axis=1)
        if top:
            ids[here] = _largest(shifted, top)
            best[here] = np.take_along_axis(shifted, ids[here], axis=1)
        total = np.log(np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64))
        found[here] = chosen[:, 0] - total
        best[here] -= total[:, None]
    return found, ids, best


def _largest(block: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """Indices [n, top] of the `top` largest per row, largest first; ties by index."""
    least = np.partition(block, -top, axis=1)[:, -top]
    found = np.empty((len(block), top), np.int64)
    for index, row in enumerate(block):
        near = np.flatnonzero(~(row < least[index]))  # more than `top` on ties
        found[index] = near[np.argsort(-row[near], kind="stable")[:top]]
    return found
