from __future__ import annotations

from lite_runner.config.suggest import did_you_mean, nearest, nearest_key

KEYS = ["temperature", "top_k", "context.device_target", "model.model_config.top_k"]


def test_nearest_ignores_case_and_gives_up_on_strangers() -> None:
    assert nearest("LEFT", ["none", "left"]) == "left"
    assert nearest("zzz", ["none", "left"]) is None


def test_a_key_is_found_in_another_section_too() -> None:
    assert nearest_key("temprature", KEYS) == "temperature"
    assert nearest_key("context.temperature", KEYS) == "temperature"
    assert nearest_key("device_target", KEYS) == "context.device_target"
    assert nearest_key("device_targt", KEYS) == "context.device_target"
    assert nearest_key("model.top_k", KEYS) == "model.model_config.top_k"
    assert nearest_key("quite_other", KEYS) is None


def test_nothing_to_suggest_is_nothing_said() -> None:
    assert did_you_mean(None) == ""
    assert did_you_mean("x") == "; did you mean x?"
