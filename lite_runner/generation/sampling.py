"""Logits processing and sampling, in the usual order of logits processors.

Repetition penalty, min_new_tokens; then, when sampling, temperature, top-k, top-p, min-p, softmax
and a draw. All take one row of float32 logits [vocab] and do not modify it. Each matches the
transformers processor of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import NonFiniteError

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.integer[Any]]

# Only the few tokens near the maximum need sorting.
_COLUMNS = 1024  # columns used to bound the k-th largest; see _largest
_MARGINS = (2.0, 4.0, 6.0, 9.0, 13.0, np.inf)  # distances from the maximum tried by _nucleus


class Sampler:
    """Samples the tokens of one sequence.

    Each sequence has its own random generator, so results do not depend on the batch or on
    scheduling.
    """

    def __init__(
        self, options: GenerationConfig, prompt: Ids, seed_key: Sequence[int], name: str = ""
    ) -> None:
        """`seed_key` seeds the draws; `name`: of the prompt, for messages."""
        self._options = options
        self._seen = prompt
        self._chosen = 0
        self._name = name
        self._random = np.random.default_rng(list(seed_key)) if options.do_sample else None
        self.scores: Floats = np.zeros(0, np.float32)  # the last logits, processed [vocab]

    def choose(self, logits: Floats) -> int:
        """The next token. Raises NonFiniteError for non-finite `logits`."""
        options = self._options
        self.scores = scores = process_logits(logits, self._seen, self._chosen, options)
        best = int(scores.argmax())  # NaN counts as the maximum
        check_finite(scores[best], self._chosen, self._name)
        token = best if self._random is None else draw(scores, options, self._random)
        self._chosen += 1
        if options.repetition_penalty != 1.0:
            self._seen = np.append(self._seen, np.int32(token))
        return token


def check_finite(best: np.floating[Any], step: int, name: str) -> None:
    """Raise NonFiniteError if the maximum score of a row is not finite."""
    if not np.isfinite(best):
        what = "NaN" if np.isnan(best) else f"no finite value (the largest is {best})"
        raise NonFiniteError(
            f"the model's logits hold {what} at step {step} of {name or 'the prompt'}",
            hint="try another precision (compute_dtype=float32)",
        )


def process_logits(logits: Floats, seen: Ids, generated: int, config: GenerationConfig) -> Floats:
    """Logits after repetition penalty and min_new_tokens.

    `seen`: ids of prompt and generated tokens, repeats allowed; `generated`: number of new tokens.
    Returns `logits` itself if nothing applies.
    """
    penalized = config.repetition_penalty != 1.0
    too_short = generated < config.min_new_tokens and bool(config.eos_token_id)
    if not (penalized or too_short):
        return logits
    scores = logits.copy()
    if penalized:
        ids = seen if config.pad_token_id is None else seen[seen != config.pad_token_id]
        values = scores[ids]
        penalty = config.repetition_penalty
        scores[ids] = np.where(values < 0, values * penalty, values / penalty)
    if too_short:
        # A config's eos id may be outside the vocabulary.
        scores[[token for token in config.eos_token_id if token < len(scores)]] = -np.inf
    return scores


def draw(scores: Floats, config: GenerationConfig, random: np.random.Generator) -> int:
    """Sample a token from `scores` with temperature, top_k, top_p and min_p."""
    ids, weights = candidates(scores, config)
    cumulative = np.cumsum(weights, dtype=np.float64)
    point = random.random() * cumulative[-1]
    # Rounding may put the point at the end.
    index = min(int(cumulative.searchsorted(point, side="right")), len(cumulative) - 1)
    return index if ids is None else int(ids[index])


def candidates(scores: Floats, config: GenerationConfig) -> tuple[Ids | None, Floats]:
    """Candidate ids (None: all) and their unnormalized probabilities."""
    ids: Ids | None = None
    if 0 < config.top_k < len(scores):
        ids = _largest(scores, config.top_k)
        scores = scores[ids]
    # Relative to the maximum, whose weight is 1; overflow is only towards -inf, a weight of 0.
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / np.float32(max(config.temperature, 1e-30)))
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


def _largest(scores: Floats, count: int) -> Ids:
    """Indices of the `count` largest, and of ties with the last of them."""
    laid_out = len(scores) - len(scores) % _COLUMNS
    if not count <= _COLUMNS <= laid_out:
        return np.flatnonzero(scores >= _last_of_best(scores, count))
    # The `count` best columns each have a score of at least the smallest of their maxima.
    best = scores[:laid_out].reshape(-1, _COLUMNS).max(axis=0)
    ids = np.flatnonzero(scores >= _last_of_best(best, count))
    near = scores[ids]
    kept: Ids = ids[near >= _last_of_best(near, count)]
    return kept


def _last_of_best(scores: Floats, count: int) -> np.floating[Any]:
    """The smallest of the `count` largest."""
    last: np.floating[Any] = np.partition(scores, -count)[-count]
    return last


def _nucleus(weights: Floats, share: float) -> Ids:
    """Indices of the smallest set of largest weights with `share` of the sum, at least one."""
    wanted = share * weights.sum(dtype=np.float64)
    ids: Ids = np.arange(len(weights))
    if len(weights) > _COLUMNS:
        for margin in _MARGINS:
            ids = np.flatnonzero(weights >= np.exp(-margin))
            if weights[ids].sum(dtype=np.float64) >= wanted:
                break
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    cumulative = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: int(cumulative.searchsorted(wanted, side="left")) + 1]


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities of `logits` along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
