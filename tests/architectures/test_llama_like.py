from __future__ import annotations

import pytest

from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from tests.weights.formats.test_init import LLAMA, read


@pytest.mark.parametrize(
    ("name", "function"),
    [("gelu", "gelu_exact"), ("gelu_new", "gelu"), ("relu", "relu"), ("relu2", "relu_squared")],
)
def test_other_activations_of_a_llama(name: str, function: str) -> None:
    model = read(LLAMA, hidden_act=name)
    assert model.feed_forward.function == function
    assert model_config_from_hf(hf_from_model_config(model), "config.json") == model
