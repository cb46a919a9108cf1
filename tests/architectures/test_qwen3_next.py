"""Qwen3-Next's config.json; its logits are compared with those of all families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import model_config_from_hf
from tests.paths import REFERENCE

RAW = json.loads((REFERENCE / "qwen3_next/config.json").read_text("utf-8"))


def read(**changes: Any) -> Decoder:
    return model_config_from_hf(RAW | changes, "config.json")


def test_every_fourth_layer_has_attention_unless_layers_are_named() -> None:
    del (raw := dict(RAW))["layer_types"]
    model = model_config_from_hf(raw | {"num_hidden_layers": 8}, "config.json")
    assert [one.recurrent is None for one in model.blocks] == [False, False, False, True] * 2
    assert len(model.cached) == 2


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_model_of_a_multimodal_qwen3_5_is_read(name: str) -> None:
    raw = json.loads((REFERENCE / f"{name}_text/config.json").read_text("utf-8"))
    rope = raw["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    outer = {"model_type": name, "text_config": raw | {"rope_parameters": rope}}
    text = model_config_from_hf(raw, "config.json")
    assert model_config_from_hf(outer, "config.json") == text and text.recurrent is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads is 3, expected a divisor of the 4"),
        ({"layer_types": ["full_attention"] * 3}, "expected 4 times linear_attention or full_att"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    ],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read(**changes)
