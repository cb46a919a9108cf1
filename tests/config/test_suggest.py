from __future__ import annotations

from lite_runner.config.suggest import did_you_mean, nearest, nearest_flag, nearest_key

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


def test_what_was_typed_is_never_suggested() -> None:
    assert nearest_key("temperature", KEYS) is None
    assert nearest_key("model.temperature", KEYS) == "temperature"


def test_a_section_in_common_makes_no_key_near() -> None:
    keys = ["model.model_config.use_fused_rope", "model.model_config.do_sample"]
    assert nearest_key("model.model_config.use_kvcache_op", keys) is None
    assert nearest_key("model.model_config.do_smple", keys) == keys[1]


def test_near_flags() -> None:
    flags = ["profile", "predict_data", "help"]
    assert nearest_flag("--vocab_file", flags) is None
    assert nearest_flag("--predict-dat", flags) == "--predict_data"
    assert nearest_flag("-hlp", flags) == "--help"


def test_nothing_to_suggest_is_nothing_said() -> None:
    assert did_you_mean(None) == ""
    assert did_you_mean("x") == "; did you mean x?"
