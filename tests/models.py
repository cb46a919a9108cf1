"""The models of conf/model and of tests/fixtures/reference."""

from __future__ import annotations

from functools import cache

from lite_runner.architectures.spec import Decoder
from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.checkpoint import model_config_of
from tests.paths import REFERENCE


@cache
def model_named(name: str) -> Decoder:
    """The model of model=NAME."""
    words = [f"model={name}", "load_checkpoint=random", "predict_data=x"]
    model = resolve(parse(words, heads()))[0].model_config()
    assert model is not None
    return model


@cache
def reference_model(case: str) -> Decoder:
    """The model of a folder of tests/fixtures/reference."""
    model = model_config_of(REFERENCE / case)
    assert model is not None
    return model
