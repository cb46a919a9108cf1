from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.architectures.spec import Prefix
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import (
    BASE,
    Message,
    Request,
    adapter_name,
    check_prefixes,
    items_of,
    with_ending,
)
from lite_runner.config.prompts import read_requests
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from tests.each import each

Resolve = Callable[..., RunConfig]
INLINE = "predict_data=[{role: system, content: Be brief.}, {role: user, content: 'Why, then?'}]"
CHAT = Request(messages=(Message("system", "Be brief."), Message("user", "Why, then?")))


def requests(resolve: Resolve, *settings: str) -> list[Request]:
    config = resolve("model=tiny_llama", *settings)
    assert run_modes.from_dict(config.to_dict()) == config
    return read_requests(config)


def test_messages_on_the_command_line(resolve: Resolve) -> None:
    assert requests(resolve, "chat=true", INLINE) == [CHAT]
    in_json = INLINE.replace("{role", '{"role"').replace(" content", ' "content"')
    in_json = in_json.replace("'", '"').replace("system,", '"system",').replace("user,", '"user",')
    in_json = in_json.replace("Be brief.", '"Be brief."')
    assert requests(resolve, "chat=true", in_json) == [CHAT]
    both = INLINE.replace("[", "[[").replace("]", "], {prompt: b, id: 2, seed: 3}]")
    assert requests(resolve, "chat=true", both) == [CHAT, Request("b", id=2, seed=3)]


def test_json_that_is_no_prompt_stays_a_text(resolve: Resolve) -> None:
    for text in ('[{"id": 3}]', "[1, 2]", "{prompt: x}", "[{]"):
        assert requests(resolve, f"predict_data={text}") == [Request(text)]


def test_options_of_a_prompt(resolve: Resolve) -> None:
    given = "predict_data=[{prompt: a, do_sample: true, top_p: 1, stop: [x, 'y z'], priority: -2}]"
    expected = Request("a", do_sample=True, top_p=1.0, stop=("x", "y z"), priority=-2)
    assert requests(resolve, given) == [expected]
    assert not expected.is_text and items_of([expected]) == (expected,)  # as ranks are given it


def test_the_system_message(resolve: Resolve) -> None:
    assert CHAT.chat("other")[0] == {"role": "system", "content": "Be brief."}
    assert Request("b").chat("Be kind.") == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "b"},
    ]
    assert Request("b").chat("") == [{"role": "user", "content": "b"}]


@each(
    ("settings", "expected"),
    [
        (["predict_data=x", "system=y"], "system= needs chat=true"),
        (["predict_data=x", "enable_thinking=true"], "enable_thinking= needs chat=true"),
        (["predict_data=[{prompt: a, sed: 3}]"], "predict_data[0].sed: no such key; did you mean"),
        (["predict_data=[{role: user}]"], "predict_data[0].content: missing"),
        (["predict_data=[a, {prompt: ''}]"], "predict_data[1]: an empty prompt"),
        (["predict_data=[a, {role: user, content: b}]"], "messages ({role, content}) and prompts"),
        (["predict_data=[{prompt: a, adapter: fr}]"], "predict_data[0]: adapter 'fr' needs"),
        (["predict_data=[{prompt: a, max_new_tokens: 0}]"], "max_new_tokens: got 0, expected"),
        (["predict_data=[{prompt: a, num_beams: 3}]"], "predict_data[0].num_beams: no such key"),
        (["predict_data=[{prompt: a, stop: ''}]"], "predict_data[0]: stop: an empty string would"),
        (["predict_data=nowhere.jsonl"], "no file nowhere.jsonl; a text that ends in .jsonl"),
        (["predict_data=notes.md"], "notes.md is a file, expected one of .txt, .jsonl, .json,"),
    ],
)
def test_errors_show_before_anything_is_read(
    resolve: Resolve, settings: list[str], expected: str
) -> None:
    Path("notes.md").write_text("x")
    with pytest.raises(ConfigError) as caught:
        resolve("model=tiny_llama", *settings)
    assert expected in str(caught.value)


def test_a_text_is_no_file_for_looking_like_one(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for text in ("what is package.json", "folder", "~nobody/x", "~ about", "x" * 5000, "a.b"):
        assert requests(resolve, f"predict_data={text}") == [Request(text)]
    (tmp_path / "my prompts.jsonl").write_text('{"prompt": "a"}')
    assert requests(resolve, "predict_data=my prompts.jsonl") == [Request("a")]


def test_the_base_model_has_one_name_for_users_and_others_that_are_taken() -> None:
    for name in (None, BASE, "Base", "", "null", "None", "NONE"):
        assert adapter_name(name) is None
    assert adapter_name("basic") == "basic"


def test_adapters_of_prompts(resolve: Resolve) -> None:
    rows = "[{prompt: a, adapter: fr}, b, {prompt: c, adapter: base}]"
    given = ["run_mode=slora", "adapter_path=x.json", f"predict_data={rows}"]
    assert [one.adapter for one in requests(resolve, *given)] == ["fr", None, None]
    by_run = requests(resolve, *given, "adapter_id=de")
    assert [one.adapter for one in by_run] == ["fr", "de", None]
    with pytest.raises(ConfigError, match="prompts with adapters of their own"):
        resolve("model=tiny_llama", *given, "adapter_id=[de,de,de]")


PREFIX = Prefix(124, (121, 120))
PLAIN = GenerationConfig()


def test_prompts_of_other_models_need_nothing() -> None:
    check_prefixes(None, [[5]], [GenerationConfig(prompt_logprobs=0)])


def test_each_prompt_that_lacks_something_is_named() -> None:
    check_prefixes(PREFIX, [[5, 121, 124, 7]], [PLAIN])
    with pytest.raises(ConfigError) as caught:
        check_prefixes(PREFIX, [[5], [5, 121, 124], [5, 124]], [PLAIN] * 3)
    assert "prompt 0 has no token 124 (sop)" in caught.value.message
    assert "prompt 2 has no token 121 or 120" in caught.value.message
    assert "prompt 1" not in caught.value.message


def test_a_prompt_has_no_likelihood() -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs: each token of a prefix sees"):
        check_prefixes(PREFIX, [[5, 121, 124]], [GenerationConfig(prompt_logprobs=0)])


def test_a_text_is_ended() -> None:
    assert with_ending(PREFIX, [5, 6]) == [5, 6, 121, 124]
    assert with_ending(PREFIX, [5, 121, 124, 6]) == [5, 121, 124, 6]
    assert with_ending(None, [5, 6]) == [5, 6]
