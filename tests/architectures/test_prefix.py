from __future__ import annotations

import numpy as np
import pytest

from lite_runner.architectures.prefix import (
    PromptPrefix,
    TwoDimensionalAngles,
    fault,
    last_seen,
    positions_of,
)
from lite_runner.architectures.spec import Prefix, Rotary

PREFIX = Prefix(124, (121, 120))


# What MindFormers 1.0.2 has for them.
@pytest.mark.parametrize(
    ("tokens", "positions", "blocks"),
    [
        ([5, 74, 121, 124], [0, 1, 2, 2], [0, 0, 0, 1]),
        ([33, 5, 6, 121, 8, 9, 124], [0, 1, 2, 3, 4, 5, 3], [0] * 6 + [1]),
        ([33, 121, 7, 124, 9, 30], [0, 1, 2, 1, 1, 1], [0, 0, 0, 1, 2, 3]),
        ([14, 15, 120, 16, 124], [0, 1, 2, 3, 2], [0, 0, 0, 0, 1]),
        ([14, 120, 15, 121, 18, 121, 124, 20], [0, 1, 2, 3, 4, 5, 3, 3], [0] * 6 + [1, 2]),
        ([50, 121, 124, 52, 124, 55], [0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 3, 4]),
    ],
)
def test_positions(tokens: list[int], positions: list[int], blocks: list[int]) -> None:
    found = PromptPrefix.of(PREFIX, np.array(tokens))
    assert found.length == tokens.index(124)
    index, length, mask = np.arange(len(tokens)), np.array(found.length), np.array(found.mask)
    got = positions_of(index, length, mask)
    assert [one.tolist() for one in got] == [positions, blocks]
    seen = [max(one, found.length - 1) for one in range(len(tokens))]
    assert last_seen(index, length).tolist() == seen


def test_without_its_marks_a_prompt_has_no_prefix() -> None:
    assert PromptPrefix.of(PREFIX, np.array([5, 6, 7])) == PromptPrefix(0, 0)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([5, 121, 124], None),
        ([5, 121], "has no token 124 (sop), which ends the prefix"),
        ([5, 124, 121], "has no token 121 or 120 (a mask) before its token 124 (sop)"),
    ],
)
def test_what_a_prompt_lacks(tokens: list[int], said: str | None) -> None:
    assert fault(PREFIX, tokens) == said


def test_tables_are_float16() -> None:
    angles = TwoDimensionalAngles(Rotary(two_dimensional=True), 16, 100)
    cos, sin = angles.of(np.array([0, 7]), np.array([3, 100]))
    assert cos.shape == sin.shape == (2, 8)
    assert np.array_equal(cos[0, :4], np.ones(4)) and np.array_equal(sin[0, :4], np.zeros(4))
    exact = np.cos(100 * 10000.0 ** -(np.arange(4) / 4))
    assert (
        np.array_equal(cos, cos.astype(np.float16)) and 0 < np.abs(cos[1, 4:] - exact).max() < 0.1
    )
