"""Rotary frequencies, ALiBi slopes and the positions of a prefix LM, in NumPy float32.

Follows transformers' rope utilities (position interpolation, dynamic NTK, Llama 3, YaRN and
LongRoPE), so a checkpoint's `rope_scaling` has the same meaning here.

A prefix LM (ChatGLM-6B) has two positions of each token. In a prompt with c tokens before the end
token, and a mask token at m < c: positions are 0 to c - 1 and then m for all that is generated;
block positions are 0 for the prefix, then 1, 2, 3 and so on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder, Latent, Prefix, RopeScaling, Rotary
from lite_runner.records import dataclass

Floats: TypeAlias = NDArray[np.float32]

# pi / 2 in parts, of which products with whole numbers below 2^20 are exact; Taylor's factors.
_QUARTER = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(9, -1, -1))
_COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(9, -1, -1))

MASKED = -1.0e9  # attention bias: far below any score, but finite: a fully masked row gives no NaN


def cos_sin(angles: Floats) -> tuple[Floats, Floats]:
    """The same bits on every processor, which NumPy's cos and sin are not: by sums and products of
    float64 alone, which each processor rounds alike. Within a bit of the nearest float32."""
    x = angles.astype(np.float64)
    turns = np.rint(x * (2 / math.pi))
    rest = ((x - turns * _QUARTER[0]) - turns * _QUARTER[1]) - turns * _QUARTER[2]
    square = rest * rest
    cos, sin = np.full_like(rest, _COS[0]), np.full_like(rest, _SIN[0])
    for of_cos, of_sin in zip(_COS[1:], _SIN[1:], strict=True):
        cos, sin = cos * square + of_cos, sin * square + of_sin
    sin = sin * rest
    quarter = turns.astype(np.int64)
    odd = quarter % 2 == 1
    found = np.where(odd, sin, cos), np.where(odd, cos, sin)
    signs = np.where((quarter + 1) % 4 > 1, -1, 1), np.where(quarter % 4 > 1, -1, 1)
    one, other = (
        (value * sign).astype(np.float32) for value, sign in zip(found, signs, strict=True)
    )
    return one, other


def frequencies(
    rotary: Rotary, head_dim: int, *, reproducible: bool = False
) -> tuple[Floats, float | Floats]:
    """Radians per position for each pair of dimensions [head_dim / 2], and a factor on cos and sin.

    Pairs that are not rotated have a frequency of 0. For `dynamic` scaling these hold up to the
    original length; beyond it the network scales them with `dynamic_exponents`. For `longrope`
    `long_frequencies` hold beyond it.
    """
    if rotary.dims is None or rotary.dims == head_dim:
        return _frequencies(rotary, head_dim, reproducible)
    if rotary.proportional:
        rotated, factor = _frequencies(rotary, head_dim, reproducible)
        rotated = rotated[: rotary.dims // 2]
    else:
        rotated, factor = _frequencies(rotary, rotary.dims, reproducible)
    resting = head_dim // 2 - len(rotated)
    factors = np.full(len(rotated), factor, np.float32)
    return np.pad(rotated, (0, resting)), np.pad(factors, (0, resting), constant_values=1)


def _frequencies(rotary: Rotary, dims: int, reproducible: bool) -> tuple[Floats, float]:
    """The same for `dims` dimensions that are all rotated."""
    base = _unscaled(rotary.theta, dims, np.float64 if reproducible else np.float32)
    scaling = rotary.scaling
    if scaling is None or scaling.type == "dynamic":
        return base, 1.0
    if scaling.type == "linear":
        return base / np.float32(scaling.factor), 1.0
    if scaling.type == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.type == "longrope":
        factors = np.array(scaling.short_factor, np.float32)
        return base / factors, _longrope_attention_factor(scaling)
    return _yarn(base, scaling, rotary.theta, dims), _yarn_attention_factor(scaling)


def long_frequencies(rotary: Rotary, head_dim: int, *, reproducible: bool = False) -> Floats:
    """As `frequencies`, for texts beyond the original length of `longrope`."""
    assert rotary.scaling is not None
    long = replace(rotary.scaling, short_factor=rotary.scaling.long_factor)
    return frequencies(replace(rotary, scaling=long), head_dim, reproducible=reproducible)[0]


def dynamic_exponents(head_dim: int) -> NDArray[np.float32]:
    """Exponents [head_dim / 2] of the base's growth ratio that scale each frequency."""
    return (-np.arange(0, head_dim, 2) / (head_dim - 2)).astype(np.float32)


def _cos_sin_of_numpy(angles: Floats) -> tuple[Floats, Floats]:
    return np.cos(angles), np.sin(angles)


class RotaryAngles:
    """cos and sin of a model's rotary angles, times the scaling's factor."""

    def __init__(self, rotary: Rotary, head_dim: int, *, reproducible: bool = False) -> None:
        """`reproducible`: the same bits on every processor."""
        self.dynamic = rotary.dynamic
        self._cos_sin = cos_sin if reproducible else _cos_sin_of_numpy
        self._power = np.float64 if reproducible else np.float32  # see _unscaled
        self._frequencies, self._factor = frequencies(rotary, head_dim, reproducible=reproducible)
        if self.dynamic is not None and self.dynamic.type == "longrope":
            self._long = long_frequencies(rotary, head_dim, reproducible=reproducible)
        elif self.dynamic is not None:
            self._exponents = dynamic_exponents(head_dim)

    def table(self, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin [length, head_dim / 2] of all position ids; not if these depend on the
        length."""
        return self._of(np.outer(np.arange(length, dtype=np.float32), self._frequencies))

    def scaled(
        self, position_ids: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin [..., head_dim / 2] by a row's length: beyond the original one dynamic NTK
        scaling lets the base grow with it, and longrope takes the long frequencies.

        `lengths`: of each token's row; broadcast against `position_ids` [...].
        """
        assert self.dynamic is not None
        factor, original = self.dynamic.factor, self.dynamic.original_seq_length
        if self.dynamic.type == "longrope":
            is_long = (lengths > original)[..., None]
            scaled = np.where(is_long, self._long, self._frequencies)
        else:
            longest = np.maximum(lengths, original).astype(np.float32)
            ratio = longest * np.float32(factor / original) - np.float32(factor - 1)
            growth = np.power(ratio[..., None], self._exponents, dtype=self._power)
            scaled = self._frequencies * growth.astype(np.float32)
        return self._of(position_ids.astype(np.float32)[..., None] * scaled)

    def _of(self, angles: Floats) -> tuple[Floats, Floats]:
        cos, sin = self._cos_sin(angles)
        return cos * self._factor, sin * self._factor


def latent_places(latent: Latent) -> NDArray[np.int32]:
    """Positions of a latent vector's numbers, then of the rotated part, in the key of absorbed
    attention: pairs (d, d + head_dim / 2) are rotated."""
    half, middle = latent.rotated // 2, (latent.rank + latent.rotated) // 2
    rotated = np.concatenate([np.arange(half), middle + np.arange(half)])
    rest = np.setdiff1d(np.arange(latent.rank + latent.rotated), rotated)
    found: NDArray[np.int32] = np.concatenate([rest, rotated]).astype(np.int32)
    return found


def absorbed(latent: Latent, heads: int, values: Floats) -> tuple[Floats, Floats]:
    """Matrices from a head's query to one of the latent vector [heads, plain + rotated, head_dim],
    and from a mean of latent vectors to its output [heads, head_dim, value], by `values` [heads *
    (plain + value), rank]."""
    places, dim = latent_places(latent), latent.rank + latent.rotated
    each = values.reshape(heads, latent.plain + latent.value, latent.rank)
    inward = np.zeros((heads, latent.plain + latent.rotated, dim), np.float32)
    inward[:, : latent.plain, places[: latent.rank]] = each[:, : latent.plain]
    inward[:, latent.plain + np.arange(latent.rotated), places[latent.rank :]] = 1
    outward = np.zeros((heads, dim, latent.value), np.float32)
    outward[:, places[: latent.rank]] = each[:, latent.plain :].swapaxes(1, 2)
    return inward, outward


def for_halves(
    cos: NDArray[np.float32], sin: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin [n, head_dim] from [n, head_dim / 2], so that the rotation of x is
    x * cos + (x with its halves swapped) * sin."""
    return np.concatenate([cos, cos], 1), np.concatenate([-sin, sin], 1)


def _unscaled(theta: float, head_dim: int, dtype: type[np.floating[Any]]) -> Floats:
    """In float64 processors differ in the last bit at most, and the nearest float32 is the same."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (1 / np.power(dtype(theta), exponents.astype(dtype))).astype(np.float32)


def _llama3(base: NDArray[np.float32], scaling: RopeScaling) -> NDArray[np.float32]:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    turns = scaling.original_seq_length * base / np.float32(2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    if span == 0:  # none lie between
        return np.where(turns < scaling.low_freq_factor, base / scaling.factor, base)
    blend = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - blend) * base / scaling.factor + blend * base).astype(np.float32)


def _yarn(
    base: NDArray[np.float32], scaling: RopeScaling, theta: float, head_dim: int
) -> NDArray[np.float32]:
    """As `_llama3`, but the blend is linear in the dimension's index."""

    def dimension(turns: float) -> float:
        span = scaling.original_seq_length / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = np.clip((np.arange(len(base), dtype=np.float32) - low) / (high - low), 0.0, 1.0)
    return (base / scaling.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        upper, lower = scaling.mscale, scaling.mscale_all_dim
        return yarn_mscale(scaling.factor, upper) / yarn_mscale(scaling.factor, lower)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's scale of cos and sin for a context extended by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return longrope_attention_factor(scaling.factor, scaling.original_seq_length)


def longrope_attention_factor(factor: float, original: int) -> float:
    """The one that follows from how far a context of `original` positions is extended."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def alibi_slopes(heads: int) -> NDArray[np.float32]:
    """ALiBi's slope per head [heads]; heads beyond a power of two take every other slope of the
    next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    finer = [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]
    return np.array(slopes + finer, np.float32)


Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class PromptPrefix:
    """The prefix of one prompt. Without the tokens that mark it, attention is plainly causal."""

    length: int = 0  # c
    mask: int = 0  # m

    @classmethod
    def of(cls, prefix: Prefix, tokens: Ints) -> PromptPrefix:
        """The prefix of the prompt `tokens` [n]."""
        ends = np.flatnonzero(tokens == prefix.end_token_id)
        length = int(ends[0]) if len(ends) else 0
        for mask in prefix.mask_token_ids:
            found = np.flatnonzero(tokens[:length] == mask)
            if len(found):
                return cls(length, int(found[0]))
        return cls(length)


def prefix_error(prefix: Prefix, tokens: Sequence[int]) -> str | None:
    """The text of a validation error for a prompt without a prefix; None: it has one."""
    if prefix.end_token_id not in tokens:
        return f"has no token {prefix.end_token_id} (sop), which ends the prefix"
    before = tokens[: tokens.index(prefix.end_token_id)]
    if not set(before) & set(prefix.mask_token_ids):
        expected = " or ".join(map(str, prefix.mask_token_ids))
        return f"has no token {expected} (a mask) before its token {prefix.end_token_id} (sop)"
    return None


def positions_of(index: Ints, length: Ints, mask: Ints) -> tuple[Ints, Ints]:
    """Positions and block positions of tokens by their `index` in the sequence; `length` and `mask`
    are those of their prompts' prefixes."""
    return np.where(index < length, index, mask), np.maximum(index - length + 1, 0)


def last_seen(index: Ints, length: Ints) -> Ints:
    """Index of the last key that each token sees."""
    return np.maximum(index, length - 1)


class TwoDimensionalAngles:
    """cos and sin of the angles of two-dimensional positions."""

    def __init__(
        self, rotary: Rotary, head_dim: int, length: int, *, reproducible: bool = False
    ) -> None:
        """`length`: number of positions; `reproducible`: the same bits on every processor."""
        pairs = head_dim // 4
        exponents = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
        frequencies = (np.float32(1.0) / np.float32(rotary.theta) ** exponents).astype(np.float16)
        # Block positions may reach the length itself.
        angles = np.outer(np.arange(length + 1).astype(np.float16), frequencies)
        compute = cos_sin if reproducible else _cos_sin_of_numpy
        self.cos, self.sin = (
            one.astype(np.float16).astype(np.float32) for one in compute(angles.astype(np.float32))
        )

    def of(self, position: Ints, block: Ints) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin [n, head_dim / 2] for positions and block positions [n]."""
        cos, sin = (
            np.concatenate([table[position], table[block]], 1) for table in (self.cos, self.sin)
        )
        return cos, sin


def prefix_angles(
    model: Decoder, length: int, *, reproducible: bool = False
) -> TwoDimensionalAngles | None:
    """The tables for `length` positions; None: the model has other positions."""
    if model.rotary is None or not model.rotary.two_dimensional:
        return None
    return TwoDimensionalAngles(model.rotary, model.head_dim, length, reproducible=reproducible)
