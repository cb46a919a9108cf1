"""DeepSeek's config.json; its logits are compared with those of all families."""

from __future__ import annotations

import json

import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights.hf import model_config_from_hf
from tests.paths import REFERENCE


def test_queries_without_a_latent_vector_are_refused() -> None:
    raw = json.loads((REFERENCE / "deepseek_v3/config.json").read_text())
    assert model_config_from_hf(raw, "config.json").attention.latent is not None
    with pytest.raises(ArtifactError, match="q_lora_rank is None, expected an integer"):
        model_config_from_hf(raw | {"q_lora_rank": None}, "config.json")
