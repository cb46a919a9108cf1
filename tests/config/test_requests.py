"""Prompts with an adapter each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config.requests import adapter_names, read_requests
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

Resolve = Callable[..., RunConfig]
SLORA = ["model=tiny_llama", "run_mode=slora", "adapter_path=a.json"]


def asked(config: RunConfig) -> list[tuple[str | None, str | None]]:
    return [(one.adapter, one.prompt) for one in read_requests(config)]


def test_a_file_of_adapters_and_prompts(resolve: Resolve) -> None:
    """A prompt may hold tabs and begin with a space; base and none are the model itself."""
    Path("x.txt").write_text("en\thello\n zh \t 你\t好\nbase\tx\nnone\ty\n", encoding="utf-8")
    found = asked(resolve(*SLORA, "predict_data=x.txt"))
    assert found == [("en", "hello"), ("zh", " 你\t好"), (None, "x"), (None, "y")]


@pytest.mark.parametrize("line", ["hello", "en\t", "en"])
def test_a_line_without_adapter_or_prompt(resolve: Resolve, line: str) -> None:
    Path("x.txt").write_text(f"en\thello\n{line}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="prompt 2 has no adapter") as caught:
        read_requests(resolve(*SLORA, "predict_data=x.txt"))
    assert repr(line) in caught.value.message and "adapter_id=NAME" in caught.value.hint


def test_one_adapter_for_all_and_one_for_each(resolve: Resolve) -> None:
    prompts = "predict_data=['a','b']"
    assert asked(resolve(*SLORA, prompts, "adapter_id=en")) == [("en", "a"), ("en", "b")]
    each = asked(resolve(*SLORA, prompts, "adapter_id=[en,base]"))
    assert each == [("en", "a"), (None, "b")]
    # With adapter_id a tab is a part of the prompt.
    Path("x.txt").write_text("en\thello\n", encoding="utf-8")
    found = asked(resolve(*SLORA, "predict_data=x.txt", "adapter_id=zh"))
    assert found == [("zh", "en\thello")]


def test_as_many_adapters_as_prompts(resolve: Resolve) -> None:
    Path("x.txt").write_text("a\nb\nc\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="got 2 for 3 prompts, expected one for each"):
        read_requests(resolve(*SLORA, "predict_data=x.txt", "adapter_id=[en,zh]"))


def test_names_without_the_model_itself() -> None:
    assert adapter_names(["en", None, "base", "zh", "en"]) == ["en", "zh", "en"]
    assert (adapter_names("en"), adapter_names(None), adapter_names("none")) == (["en"], [], [])
