"""Models that no backend computes are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lite_runner.architectures import unshardable, unsupported
from lite_runner.architectures.spec import Attention, Decoder, RopeScaling, Rotary
from tests import references

Reference = Callable[[str], Any]


def with_last(model: Decoder, **changes: object) -> Decoder:
    """The model with another attention in its last layer."""
    *blocks, last = model.blocks
    return replace(
        model, blocks=(*blocks, replace(last, attention=replace(last.attention, **changes)))
    )


def test_reference_models_are_supported(subtests: pytest.Subtests, reference: Reference) -> None:
    for case in references.every():
        with subtests.test(case=case):
            assert unsupported(reference(case).config, native=True) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 2, "kv_heads": 2}, "heads that differ between layers need backend=native"),
        (
            {"rotary": Rotary(5.0, RopeScaling("dynamic", 2.0, 16))},
            "rotary positions that depend on the length differ between its layers",
        ),
        ({"rotary": None, "alibi": True}, "positions differ between its layers"),
    ],
)
def test_layers_that_differ(changes: dict[str, object], message: str, reference: Reference) -> None:
    model = reference("llama").config
    assert unsupported(with_last(model, **changes)) == [message]
    assert unsupported(with_last(model, window=3, qkv_bias=True)) == []


def test_recurrent_layers_are_of_the_native_kernels(reference: Reference) -> None:
    for case, gates in (("qwen3_next", True), ("granitemoehybrid", False)):
        model = reference(case).config
        reasons = ["recurrent layers need backend=native"]
        assert unsupported(model) == reasons + gates * ["gates of attention need backend=native"]
        assert unshardable(model).startswith("has recurrent layers")


def test_factors_of_longrope(reference: Reference) -> None:
    model = reference("phi3_long").config
    few = RopeScaling("longrope", 4.0, 16, short_factor=(1.0,), long_factor=(1.0,) * 4)
    (reason,) = unsupported(model.with_rope_scaling(few))
    assert reason.startswith("longrope has 1 short and 4 long factors, expected 4 of each")


def test_an_odd_head(reference: Reference) -> None:
    model = reference("llama").config
    odd = Attention(2, 1, 5, Rotary())
    blocks = tuple(replace(block, attention=odd) for block in model.blocks)
    assert unsupported(replace(model, blocks=blocks)) == [
        "rotary positions need an even head_dim, got 5"
    ]
