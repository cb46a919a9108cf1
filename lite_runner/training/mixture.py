"""Mixtures of experts on the tape: routing, and the sum of the chosen experts' outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Experts
from lite_runner.training.kernels import Array
from lite_runner.training.tape import Tape, Value


def routed(
    tape: Tape, logits: Value, given: Experts, choice_bias: Array | None = None
) -> tuple[NDArray[np.int64], Value]:
    """logits [n, experts] -> the chosen experts and their factors [n, chosen]; `choice_bias`: see
    spec.Experts."""
    if given.sigmoid:
        shares = 1 / (1 + np.exp(-logits.array))
    else:
        shares = np.exp(logits.array - logits.array.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
    scores = shares if choice_bias is None else shares + choice_bias
    chosen = np.argsort(-_allowed(scores, given), axis=-1, kind="stable")[:, : given.chosen]
    taken = np.take_along_axis(shares, chosen, axis=-1)
    total = taken.sum(-1, keepdims=True) if given.renormalized else np.float32(1)
    parts, scale = taken / total, np.float32(given.scale)

    def backward(grad: Array) -> None:
        assert logits.slot is not None
        grad = grad * scale
        if given.renormalized:
            grad = (grad - (grad * parts).sum(-1, keepdims=True)) / total
        to_shares = np.zeros_like(shares)
        np.put_along_axis(to_shares, chosen, grad, axis=-1)
        if given.sigmoid:
            to_shares *= 1 - shares
        else:
            to_shares -= (to_shares * shares).sum(-1, keepdims=True)
        to_shares *= shares
        logits.slot.add(to_shares)

    return chosen, tape.record(parts * scale, [logits], backward)


def _allowed(scores: Array, given: Experts) -> Array:
    """The scores with experts outside the best groups masked."""
    if given.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), given.groups, -1)
    best = np.sort(grouped, axis=-1)[..., -given.best_of_group :].sum(-1)
    taken = np.argsort(-best, axis=-1, kind="stable")[:, : given.chosen_groups]
    allowed = np.zeros_like(best, bool)
    np.put_along_axis(allowed, taken, True, axis=-1)
    return np.where(allowed[..., None], grouped, np.float32(-np.inf)).reshape(scores.shape)


def sigmoid_of(tape: Tape, x: Value, logit: Value) -> Value:
    """x [n, width] times the sigmoid of logits [n, 1]."""
    share = 1 / (1 + np.exp(-logit.array))

    def backward(grad: Array) -> None:
        if x.slot is not None:
            x.slot.add(grad * share)
        if logit.slot is not None:
            along = (grad * x.array).sum(-1, keepdims=True)
            logit.slot.add(along * share * (1 - share))

    return tape.record(x.array * share, [x, logit], backward)


def gathered(
    tape: Tape,
    shape: tuple[int, ...],
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], Value]],
    factors: Value,
) -> Value:
    """The sum of what experts give: of each part its rows in an array of this `shape`, its places
    among a row's `factors` [n, chosen], and the values."""
    out = np.zeros(shape, np.float32)
    for rows, place, value in parts:
        out[rows] += factors.array[rows, place, None] * value.array

    def backward(grad: Array) -> None:
        to_factors = np.zeros_like(factors.array)
        for rows, place, value in parts:
            taken = grad[rows]
            to_factors[rows, place] = (taken * value.array).sum(-1)
            if value.slot is not None:
                value.slot.add(taken * factors.array[rows, place, None])
        if factors.slot is not None:
            factors.slot.add(to_factors)

    return tape.record(out, [factors, *(value for _, _, value in parts)], backward)
