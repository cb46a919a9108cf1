"""A backend that is given more room computes what one with that room from the start does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lite_runner.backends import Growing, Row


@pytest.mark.parametrize("case", ["bloom", "gpt2", "llama", "llama_rope_dynamic"])
def test_own_operators(case: str, reference: Callable) -> None:
    known = reference(case)
    model = known.native(1, 8)
    assert isinstance(model, Growing)
    model.forward([Row(0, known.prompts[0][:4], 0)])
    slots = len(known.prompts)
    model.grow(slots, known.length)
    assert (model.info.slots, model.info.max_length >= known.length) == (slots, True)
    assert np.array_equal(known.run(model), known.run(known.native(slots, known.length)))


@pytest.mark.parametrize(("case", "use_past"), [("llama", True), ("bloom", False)])
def test_operators_of_mindspore(
    case: str, use_past: bool, reference: Callable, relative_error: Callable
) -> None:
    known = reference(case)
    model = known.online(1, 8, use_past=use_past)
    assert isinstance(model, Growing)
    model.forward([Row(0, known.prompts[0][:4], 0)])
    model.grow(len(known.prompts), 2 * known.length)  # by row and then by column
    expected = known.logits if use_past else known.logits_no_cache
    assert relative_error(known.run(model), expected) < 1e-4


def test_names_of_parameters_stay(reference: Callable) -> None:
    model = reference("llama").online(1, 8)
    before = [one.name for one in model._network.get_parameters()]
    model.grow(2, 16)
    assert sorted(one.name for one in model._network.get_parameters()) == sorted(before)
