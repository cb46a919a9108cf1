"""Files of prompts: what each kind holds, and what is said of one that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.config import prompt_files
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Message, Request
from lite_runner.config.prompts import read_prompts
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

Resolve = Callable[..., RunConfig]
Read = Callable[..., list[str | Request]]
CHAT = (Message("system", "Be brief."), Message("user", "中文?"))
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "中文?"}]


@pytest.fixture
def read(resolve: Resolve, tmp_path: Path) -> Read:
    """The prompts of a file of this name and content, in a run with these settings."""

    def read(name: str, content: str | bytes, *settings: str) -> list[str | Request]:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        return read_prompts(resolve("model=tiny_llama", f"predict_data={name}", *settings))

    return read


def test_jsonl(read: Read) -> None:
    lines = [
        {"prompt": "a\nb", "adapter": "fr", "max_new_tokens": 3, "seed": 4, "id": "q1"},
        "only a text",
        {"prompt": "中文", "id": 7, "adapter": None},
    ]
    text = "\ufeff" + "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    assert read("p.jsonl", text, "adapter_path=x.json") == [
        Request("a\nb", adapter="fr", max_new_tokens=3, seed=4, id="q1"),
        Request("only a text"),
        Request("中文", id=7),
    ]


def test_chats(read: Read) -> None:
    one = json.dumps({"messages": MESSAGES, "id": 1})
    assert read("p.jsonl", f"{one}\n{json.dumps(MESSAGES)}\n", "chat=true") == [
        Request(messages=CHAT, id=1),
        Request(messages=CHAT),
    ]
    assert read("c.json", json.dumps(MESSAGES), "chat=true") == [Request(messages=CHAT)]
    assert read("c.json", json.dumps([MESSAGES, "b"]), "chat=true") == [
        Request(messages=CHAT),
        Request("b"),
    ]


def test_json(read: Read) -> None:
    assert read("p.json", '{"prompt": "a"}') == [Request("a")]
    assert read("p.JSON", '["a", {"prompt": "b", "id": "x"}]') == [
        Request("a"),
        Request("b", id="x"),
    ]


def test_csv(read: Read, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'id,prompt,max_new_tokens,label\r\n7,"a, ""b""\nc",4,x\r\n\r\n8,d,,y\r\n'
    assert read("p.csv", text) == [
        Request('a, "b"\nc', max_new_tokens=4, id="7"),
        Request("d", id="8"),
    ]
    assert "p.csv: not read: label" in capsys.readouterr().err
    assert read("p.csv", "question\nwhy\n") == [Request("why")]
    assert "in the column 'question'" in capsys.readouterr().err
    assert read("p.csv", "prompt\n" + "x" * 200_000) == [Request("x" * 200_000)]


OPTIONS = {
    "min_new_tokens": 2,
    "do_sample": True,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "stop": ("a, b", "c"),
    "logprobs": 3,
    "prompt_logprobs": 0,
    "priority": -1,
}


def test_options_of_a_prompt(read: Read) -> None:
    expected = Request("a", max_new_tokens=4, seed=0, **OPTIONS)
    record = {"prompt": "a", "max_new_tokens": 4, "seed": 0, **OPTIONS}
    assert read("p.jsonl", json.dumps(record)) == [expected]
    assert read("p.json", json.dumps([record, "b"])) == [expected, Request("b")]
    cells = (
        "prompt,max_new_tokens,seed,min_new_tokens,do_sample,temperature,top_k,top_p,min_p,"
        "repetition_penalty,stop,logprobs,prompt_logprobs,priority\n"
        'a,4,0,2,TRUE,0.5,5,0.75,0.125,1.5,"[""a, b"", ""c""]",3,0,-1\n'
        '3,,,,,,,,,,"one, text",,,\n'
    )
    assert read("p.csv", cells) == [expected, Request("3", stop="one, text")]
    options = expected.options(GenerationConfig(max_length=9, num_beams=1, top_p=0.5))
    wanted = {name: value for name, value in OPTIONS.items() if name != "priority"}
    assert options == GenerationConfig(max_new_tokens=4, seed=0, **wanted)
    assert Request("b", stop="x").options(GenerationConfig()) == GenerationConfig(stop=("x",))


def test_options_of_a_prompt_fit_those_of_the_run(read: Read) -> None:
    warm = '{"prompt": "a", "temperature": 0.5}'
    assert read("p.jsonl", warm, "do_sample=true") == [Request("a", temperature=0.5)]
    greedy = '{"prompt": "a", "do_sample": false}'
    assert read("p.jsonl", greedy, "do_sample=true", "top_k=3") == [Request("a", do_sample=False)]
    # What the run says is its own fault.
    assert read("p.jsonl", '{"prompt": "a", "seed": 1}', "num_beams=2") == [Request("a", seed=1)]
    acceleration = ["backend=mslite", "model.model_config.is_sample_acceleration=true"]
    for record, settings, expected in (
        (
            {"stop": "x"},
            ["num_beams=2"],
            "p.jsonl:1: stop strings are not available with num_beams=2",
        ),
        ({"logprobs": 0}, ["num_beams=2"], "logprobs=0 is not available with num_beams=2"),
        ({"do_sample": True}, ["num_beams=2"], "num_beams=2 with do_sample=true is not available"),
        ({"max_new_tokens": 1}, ["min_new_tokens=2"], "min_new_tokens: got 2, expected at most"),
        ({"prompt_logprobs": 0}, ["backend=mslite"], "prompt_logprobs=0 is not available with"),
        (
            {"repetition_penalty": 2},
            acceleration,
            "returns the argmax alone, no logits, so repetition_penalty=2 cannot be done",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            read("p.jsonl", json.dumps({"prompt": "a", **record}), *settings)
        assert expected in str(caught.value)
    several = ["do_sample=true", "num_return_sequences=2"]
    with pytest.raises(ConfigError, match="num_return_sequences: got 2, expected 1: greedy"):
        read("p.jsonl", greedy, *several)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("p.jsonl", "\n\n", "p.jsonl has no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "p.jsonl:2: no JSON at column 12"),
        (
            "p.jsonl",
            '{"prompt": "a", "prompt": "b"}',
            "p.jsonl:1: no JSON: the key 'prompt' occurs twice",
        ),
        ("p.jsonl", '{"prompt": "a", "seed": NaN}', "NaN is no number"),
        ("p.jsonl", "[" * 100_000, "p.jsonl:1: no JSON: nested too deeply"),
        ("p.jsonl", "7", "p.jsonl:1: got 7, expected an object"),
        ("p.jsonl", '{"text": "a"}', "p.jsonl:1: no prompt; expected prompt or messages"),
        ("p.jsonl", '{"prompt": ""}', "p.jsonl:1: an empty prompt"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "p.jsonl:1: no JSON: half of a surr"),
        ("p.jsonl", '{"prompt": 5}', "p.jsonl:1: prompt: got 5, expected a text"),
        ("p.jsonl", '{"prompts": "a"}', "p.jsonl:1: prompts: no such key; did you mean prompt?"),
        ("p.jsonl", '{"prompt": "a", "seed": -1}', "p.jsonl:1: seed: got -1, expected"),
        ("p.jsonl", '{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: got 0, expected"),
        ("p.jsonl", '{"prompt": "a", "num_beams": 1}', "num_beams is said for all prompts"),
        ("p.jsonl", '{"prompt": "a", "max_length": 1}', "max_length is said for all prompts"),
        ("p.jsonl", '{"prompt": "a", "temperature": 0.5}', "p.jsonl:1: temperature=0.5 has an eff"),
        ("p.jsonl", '{"prompt": "a", "temperature": 0}', "temperature: got 0, expected a number >"),
        ("p.jsonl", '{"prompt": "a", "top_k": -1}', "top_k: got -1, expected an integer >= 0"),
        ("p.jsonl", '{"prompt": "a", "top_p": 0}', "top_p: got 0, expected a number > 0 and <= 1"),
        ("p.jsonl", '{"prompt": "a", "min_p": 2}', "min_p: got 2, expected a number >= 0 and <= 1"),
        ("p.jsonl", '{"prompt": "a", "do_sample": 1}', "do_sample: got 1, expected true or false"),
        ("p.jsonl", '{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty: got 0, expe"),
        ("p.jsonl", '{"prompt": "a", "stop": [1]}', "stop[0]: got 1, expected a text"),
        ("p.jsonl", '{"prompt": "a", "stop": ["x", ""]}', "stop: an empty string would end"),
        ("p.jsonl", '{"prompt": "a", "logprobs": 101}', "logprobs: got 101, expected"),
        ("p.jsonl", '{"prompt": "a", "priority": 0.5}', "priority: got 0.5, expected an integer"),
        (
            "p.jsonl",
            '{"prompt": "a", "min_new_tokens": 3, "max_new_tokens": 2}',
            "p.jsonl:1: min_new_tokens: got 3, expected at most max_new_tokens=2",
        ),
        ("p.jsonl", '{"prompt": "a", "adapter": "fr"}', "adapter 'fr' needs adapter_path="),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', "messages need chat=true"),
        ("p.json", '{\n"prompt": \n"a" 1}', "p.json:3: no JSON at column 5"),
        ("p.json", "[]", "p.json has no prompts"),
        ("p.json", "[{}]", "p.json[0]: no prompt"),
        ("p.csv", "", "p.csv has no prompts"),
        ("p.csv", "a,b\n1,2\n", "p.csv:1: got the columns 'a', 'b', expected one that is called"),
        ("p.csv", "prompt;id\na;1\n", "expected columns with commas"),
        ("p.csv", "prompt,prompt\na,b\n", "each name once"),
        ("p.csv", "prompt,id\na\n", "p.csv:2: got 1 columns, expected 2: prompt, id"),
        ("p.csv", "prompt,seed\na,x\n", "p.csv:2: seed: got 'x', expected an integer"),
        ("p.csv", "prompt,do_sample\na,yes\n", "p.csv:2: do_sample: got 'yes', expected true"),
        ("p.csv", "prompt,top_p\na,NaN\n", "p.csv:2: top_p: got 'NaN', expected a number"),
        ("p.csv", 'prompt\n"a\n', "no CSV: unexpected end"),
        ("p.csv", b"prompt\n\xff\n", "is not UTF-8: byte 0xff"),
    ],
)
def test_what_is_wrong_says_where(
    read: Read, name: str, content: str | bytes, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(name, content)
    assert expected in str(caught.value)


def test_a_file_of_too_many_prompts_is_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "MAX_RECORDS", 2)
    assert len(read("p.jsonl", '"a"\n"b"\n')) == 2
    with pytest.raises(ConfigError, match="more than 2 prompts"):
        read("p.csv", "prompt\na\nb\nc\n")


def test_many_faults_are_told_at_once_but_not_all(read: Read) -> None:
    with pytest.raises(ConfigError) as caught:
        read("p.jsonl", '{"prompt": 1}\n' * 30)
    assert caught.value.message.startswith("30 faults in p.jsonl:")
    assert "p.jsonl:10: " in caught.value.message and "and 20 more" in caught.value.message
    assert "p.jsonl:11: " not in caught.value.message
