"""GPT-2 and BLOOM with the GELU that MindSpore calls fast."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.architectures import gpt2
from lite_runner.errors import ConfigError
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from tests.models import reference_model

SIZES = {"vocab_size": 64, "hidden_size": 16, "n_layer": 2, "n_head": 2}


@pytest.mark.parametrize(
    ("model_type", "key", "usual"),
    [("bloom", "hidden_act", "gelu"), ("gpt2", "activation_function", "gelu_new")],
)
def test_a_config_json_says_which_gelu(model_type: str, key: str, usual: str) -> None:
    raw: dict[str, Any] = {"model_type": model_type, **SIZES}
    plain = model_config_from_hf(raw, "config.json")
    assert model_config_from_hf({**raw, key: usual}, "config.json") == plain
    quick = model_config_from_hf({**raw, key: "quick_gelu"}, "config.json")
    assert quick.feed_forward.activation == "quick_gelu"
    assert model_config_from_hf(hf_from_model_config(quick), "config.json") == quick


@pytest.mark.parametrize("case", ["gpt2_by_layer", "bloom_normed"])
def test_mindformers_has_no_words_for_scaled_scores_and_normed_residuals(case: str) -> None:
    with pytest.raises(ConfigError, match="MindFormers' config cannot express"):
        gpt2.settings(reference_model(case))
