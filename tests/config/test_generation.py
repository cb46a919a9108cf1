"""The lengths that the options of a generation allow."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from lite_runner.api.options import GenerationConfig as ApiConfig
from lite_runner.api.options import merged_options
from lite_runner.config.generation import GenerationConfig, sampled, without_effect
from lite_runner.config.prompt import Request
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

OFTEN: tuple[dict[str, Any], ...] = ({}, {"top_k": 0}, {"top_p": 1.0}, {"top_k": 5}, {"min_p": 0.1})


@pytest.mark.parametrize(
    "options, exceeded, prompt, sequence",
    [
        (GenerationConfig(), None, 9, 10),
        (GenerationConfig(max_new_tokens=4), None, 6, 7),
        (GenerationConfig(max_new_tokens=9), None, 1, 10),
        (GenerationConfig(max_new_tokens=10), "max_new_tokens", 0, 10),
        (GenerationConfig(max_new_tokens=0), None, 10, 3),
        (GenerationConfig(max_length=8), None, 7, 8),
        (GenerationConfig(max_length=11), "max_length", 9, 10),
        (GenerationConfig(max_new_tokens=900, max_length=10), None, 9, 10),
    ],
)
def test_lengths_in_a_context_of_10_tokens(
    options: GenerationConfig, exceeded: str | None, prompt: int, sequence: int
) -> None:
    assert options.exceeded_limit(10) == exceeded
    assert options.max_prompt(10) == prompt
    assert options.max_sequence(3, 10) == sequence


def rule(given: dict[str, Any], usual: bool) -> bool:
    """The rule in docs/predict.md."""
    if "do_sample" in given:
        return bool(given["do_sample"])
    if "temperature" in given:
        return bool(given["temperature"] > 0)
    return (
        usual or bool(given.get("top_k")) or given.get("top_p", 1) < 1 or given.get("min_p", 0) > 0
    )


def test_one_rule_decides_sampling(resolve: Callable[..., RunConfig]) -> None:
    """Of a run, of a prompt in it, of a call in Python, and of its GenerationConfig."""
    for decided, temperature, more in product((None, True, False), (None, 0, 1, 0.5), OFTEN):
        given = {**more}
        given |= {} if decided is None else {"do_sample": decided}
        given |= {} if temperature is None else {"temperature": temperature}
        line = [f"{name}={value}" for name, value in given.items()]
        if decided and temperature == 0:
            with pytest.raises(ConfigError, match="temperature=0 is greedy"):
                resolve("model=tiny_llama", "predict_data=x", *line)
            continue
        for usual in (False, True):
            model = f"model.model_config.do_sample={usual}"
            options = resolve("model=tiny_llama", "predict_data=x", model, *line).generation()
            assert options.do_sample is rule(given, usual), line
            assert options.temperature == (temperature or 1.0)
            own = Request(prompt="x", **given).options(GenerationConfig(do_sample=usual))
            assert own.do_sample is rule(given, usual), given
            assert own.temperature == (temperature or 1.0)
        for base in (None, {"do_sample": True}, {"temperature": 0.2}, {"temperature": 0}):
            merged = merged_options(base, given)
            usual = bool(sampled(base or {}))
            assert bool(merged.get("do_sample")) is rule(given, usual), (base, given)
        assert ApiConfig(**given).do_sample is rule(given, False)
        assert ApiConfig(**given).temperature == (1.0 if temperature is None else temperature)


def test_options_without_effect_are_named(notes: Callable[..., list[str]]) -> None:
    line = ("model=tiny_llama", "predict_data=x", "do_sample=false")
    assert notes(*line, "top_k=3", "top_p=1", "temperature=0.5") == [
        "temperature=0.5, top_k=3: no effect with do_sample=false, which is greedy"
    ]
    assert notes(*line, "temperature=0", "top_k=0") == []
    assert without_effect({"temperature": 0, "top_p": 0.9}) == (
        "top_p=0.9: no effect with temperature=0, which is greedy"
    )


def test_choices_that_an_answer_cannot_be(
    resolve: Callable[..., RunConfig], faults: Callable[..., str]
) -> None:
    run = ["model=tiny_llama", "predict_data=hi"]
    expected = "guided_choice: expected one or more texts, none of them empty"
    assert expected in faults(*run, "guided_choice=[a,'']")
    assert expected in faults(*run, "guided_choice=[]")
    resolve(*run, "guided_choice=[a]", "min_new_tokens=0")
    errors = faults(*run, "guided_choice=[a]", "min_new_tokens=1")
    assert "min_new_tokens=1 cannot be combined with guided_choice" in errors
    errors = faults(*run, "guided_choice=[a]", "num_beams=2")
    assert "num_beams=2 cannot be combined with guided_choice" in errors
