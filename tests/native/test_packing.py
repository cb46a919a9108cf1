"""What packed layers say of themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lite_runner.native import matrices, packing, versions
from lite_runner.native.layout import Block
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
        matrices.matrix(inward),
        matrices.matrix(outward),
        NORM,
        None,
        **more,
    ).block()


def feed_forward() -> Block:
    weight = np.ones((16, 16), np.float32)
    both = matrices.matrix(matrices.Alternating(weight, weight), (NORM.gamma, NORM.gamma))
    down = matrices.matrix(weight, NORM.gamma)
    form = {"hidden": 16, "wide": 16, "gated": True, "residual": True}
    return packing.feed_forward(both, down, NORM, None, **form).block()


@pytest.mark.parametrize(
    "more", [{"window": 7}, {"qk_norm": (NORM, None)}, {"qk_norm": (None, NORM)}]
)
def test_only_what_needs_it_is_of_a_newer_format(more: dict[str, Any]) -> None:
    old = [attention(), feed_forward(), attention(window=None, qk_norm=(None, None))]
    np.testing.assert_array_equal(old[0], old[2])
    assert versions.format_of(old) == 1
    assert versions.format_of([*old, attention(**more), feed_forward()]) == 2
    general = packing.GeneralAttention(0.5, packing.Residual(2.0, NORM), joint_norm=True)
    newest = attention(general=general, **more)
    assert versions.format_of([*old, newest, feed_forward()]) == 3
