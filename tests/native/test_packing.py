"""What packed layers say of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lite_runner.native import packing
from lite_runner.native.packing import Block
from tests.native.in_numpy import a_norm

RNG = np.random.default_rng(0)
NORM = a_norm(16, False, RNG)


def attention(**more: Any) -> Block:
    inward, outward = np.ones((64, 16), np.float32), np.ones((16, 32), np.float32)
    shape = packing.AttentionShape(
        2, 1, 16, hidden=16, rotary=True, residual=True, window=more.pop("window", None)
    )
    return packing.attention(
        shape,
        packing.matrix(inward),
        packing.matrix(outward),
        NORM,
        None,
        **more,
    ).block()


def feed_forward() -> Block:
    weight = np.ones((16, 16), np.float32)
    both = packing.matrix(packing.Alternating(weight, weight), (NORM.gamma, NORM.gamma))
    down = packing.matrix(weight, NORM.gamma)
    form = {"hidden": 16, "wide": 16, "gated": True, "residual": True}
    return packing.feed_forward(both, down, NORM, None, **form).block()


@pytest.mark.parametrize(
    "more", [{"window": 7}, {"qk_norm": (NORM, None)}, {"qk_norm": (None, NORM)}]
)
def test_only_what_needs_it_is_of_a_newer_format(more: dict[str, Any]) -> None:
    old = [attention(), feed_forward(), attention(window=None, qk_norm=(None, None))]
    np.testing.assert_array_equal(old[0], old[2])
    assert packing.format_of(old) == 1
    assert packing.format_of([*old, attention(**more), feed_forward()]) == 2
    general = packing.GeneralAttention(0.5, packing.Residual(2.0, NORM), joint_norm=True)
    newest = attention(general=general, **more)
    assert packing.format_of([*old, newest, feed_forward()]) == 3


def test_biases_of_panels_in_turn_are_one_of_each() -> None:
    weight = np.ones((40, 16), np.float32)
    first, second = np.arange(40, dtype=np.float32), -np.arange(40, dtype=np.float32)
    block = packing.matrix(packing.Alternating(weight, weight), (first, second)).block()
    panels = block[-4 * 128 :].view(np.float32).reshape(4, 32)
    np.testing.assert_array_equal(panels[0], first[:32])
    np.testing.assert_array_equal(panels[1], second[:32])
    np.testing.assert_array_equal(panels[2, :8], first[32:])
    np.testing.assert_array_equal(panels[3, :8], second[32:])
    assert not panels[2:, 8:].any()
    with pytest.raises(AssertionError):
        packing.matrix(weight, (first, second))
