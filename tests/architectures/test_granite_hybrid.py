"""Config.json of Granite 4 hybrid; its logits are compared with those of all families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import model_config_from_hf
from tests.paths import REFERENCE

RAW = json.loads((REFERENCE / "granitemoehybrid/config.json").read_text("utf-8"))


def read(**changes: Any) -> Decoder:
    return model_config_from_hf(RAW | changes, "config.json")


def test_published_names_of_layers_and_no_positions() -> None:
    kinds = ["mamba", "attention", "mamba"]
    model = read(layer_types=kinds, position_embedding_type="nope")
    assert model == read() and model.rotary is None
    assert [one.recurrent is None for one in model.blocks] == [False, True, False]


def test_no_experts_are_chosen_of_none() -> None:
    dense = read(num_local_experts=0, num_experts_per_tok=0)  # as the published dense ones say
    assert dense == read(num_local_experts=0) and dense.sparse is None


@pytest.mark.parametrize("limit", [[0.0, float("inf")], [0.0, {"__float__": "Infinity"}], None])
def test_a_limit_that_is_none(limit: Any) -> None:
    assert read(time_step_limit=limit) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_limit": [0.0, 1.0]}, r"time_step_limit is \[0.0, 1.0\], expected \[0, Inf"),
        ({"mamba_n_heads": 7}, "mamba_n_heads is 7, expected a divisor of 64"),
        ({"mamba_n_groups": 3}, "mamba_n_groups is 3, expected a divisor of the 8 heads"),
        ({"mamba_d_head": 9}, "mamba_d_head is 9, expected 8"),
        ({"layer_types": ["attention"] * 2}, "expected 3 times mamba or attention"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read(**changes)
