from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.config import prompts
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Message, Request
from lite_runner.config.prompts import adapter_names, read_prompts, read_requests, with_seed
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from tests.each import each

Resolve = Callable[..., RunConfig]
TINY = "model=tiny_llama"


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_terminal_is_asked_for_the_prompt(
    resolve: Resolve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for terminal, verbosity, asked in ((True, 1, True), (True, 0, False), (False, 1, False)):
        feed(monkeypatch, b"hi\n")
        monkeypatch.setattr("sys.stdin.isatty", lambda terminal=terminal: terminal)
        config = resolve(TINY, "predict_data=-", f"verbosity={verbosity}")
        assert read_prompts(config) == ["hi"]
        assert ("type the prompt; Ctrl-D" in capsys.readouterr().err) == asked


def test_a_text_and_a_list(resolve: Resolve) -> None:
    assert read_prompts(resolve(TINY, "predict_data= a\n")) == [" a\n"]
    assert read_prompts(resolve(TINY, "predict_data=['a.txt','b']")) == ["a.txt", "b"]
    assert read_prompts(resolve(TINY, "predict_data=-x")) == ["-x"]
    assert read_prompts(resolve(TINY, "predict_data=see\na.txt")) == ["see\na.txt"]
    assert read_prompts(resolve(TINY, "dry_run=true")) == []


def test_a_text_that_names_a_file_can_be_typed_as_a_prompt(resolve: Resolve) -> None:
    Path("notes.md").touch()
    texts = ("a.txt", "notes.md", "Hello, please read a.txt", "what's in a.txt", '"${x}": a.txt')
    for text in texts:
        with pytest.raises(ConfigError, match="as a prompt: ") as caught:
            resolve(TINY, f"predict_data={text}")
        (word,) = shlex.split(caught.value.message.partition("as a prompt: ")[2].rstrip(")"))
        assert read_prompts(resolve(TINY, word)) == [text]


def test_a_file_holds_a_prompt_a_line(resolve: Resolve, tmp_path: Path) -> None:
    file = tmp_path / "my prompts=1.txt"
    file.write_bytes("\ufeffone \r\n\n  \n两 行\u2028x\nlast".encode())
    config = resolve(TINY, f"predict_data={file}")
    assert read_prompts(config) == ["one ", "两 行\u2028x", "last"]


def test_a_backslash_and_an_n_break_a_line_in_a_file_alone(
    resolve: Resolve, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\\ntwo\nthree\n", encoding="utf-8")
    assert read_prompts(resolve(TINY, f"predict_data={file}")) == ["one\ntwo", "three"]
    assert read_prompts(resolve(TINY, "predict_data=one\\ntwo")) == ["one\\ntwo"]
    assert read_prompts(resolve(TINY, "--predict_data", "one\\ntwo")) == ["one\ntwo"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "has no lines"),
        (b"\n \n", "has no lines"),
        (b"ok\n\xff\xfe", "is not UTF-8: byte 0xff at 3"),
    ],
)
def test_a_file_without_prompts_is_refused(
    resolve: Resolve, tmp_path: Path, content: bytes, expected: str
) -> None:
    (tmp_path / "p.txt").write_bytes(content)
    config = resolve(TINY, f"predict_data={tmp_path}/p.txt")
    with pytest.raises(ConfigError, match=expected):
        read_prompts(config)


def test_a_file_that_vanished_is_refused(resolve: Resolve, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("x", encoding="utf-8")
    config = resolve(TINY, f"predict_data={tmp_path}/p.txt")
    (tmp_path / "p.txt").unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(config)


def test_a_file_that_is_too_large_is_refused(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MAX_PROMPT_BYTES", 3)
    (tmp_path / "p.txt").write_text("four", encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 3 bytes"):
        read_prompts(resolve(TINY, f"predict_data={tmp_path}/p.txt"))


def test_standard_input_is_one_prompt(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(TINY, "predict_data=-")
    feed(monkeypatch, "两行\nsecond\n\n".encode())
    assert read_prompts(config) == ["两行\nsecond\n"]
    feed(monkeypatch, "\ufeffhi\n".encode())  # as Windows writes it
    assert read_prompts(config) == ["hi"]
    feed(monkeypatch, b"\n")
    with pytest.raises(ConfigError, match="standard input is empty"):
        read_prompts(config)
    feed(monkeypatch, b"\xff")
    with pytest.raises(ConfigError, match="standard input is not UTF-8"):
        read_prompts(config)


def test_a_home_folder_is_expanded(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    (tmp_path / "p.txt").write_text("home", encoding="utf-8")
    assert read_prompts(resolve(TINY, "predict_data=~/p.txt")) == ["home"]


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
            "returns the argmax alone, no logits, which rules out repetition_penalty=2",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            read("p.jsonl", json.dumps({"prompt": "a", **record}), *settings)
        assert expected in str(caught.value)
    several = ["do_sample=true", "num_return_sequences=2"]
    with pytest.raises(ConfigError, match="num_return_sequences: got 2, expected 1: greedy"):
        read("p.jsonl", greedy, *several)


ERRORS = [
    ("p.jsonl", "\n\n", "p.jsonl has no prompts"),
    ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "p.jsonl:2: not JSON at column 12"),
    (
        "p.jsonl",
        '{"prompt": "a", "prompt": "b"}',
        "p.jsonl:1: not JSON: the key 'prompt' occurs twice",
    ),
    ("p.jsonl", '{"prompt": "a", "seed": NaN}', "NaN is not a JSON number"),
    ("p.jsonl", "[" * 100_000, "p.jsonl:1: not JSON: nested too deeply"),
    ("p.jsonl", "7", "p.jsonl:1: got 7, expected an object"),
    ("p.jsonl", '{"text": "a"}', "p.jsonl:1: no prompt; expected prompt or messages"),
    ("p.jsonl", '{"prompt": ""}', "p.jsonl:1: an empty prompt"),
    ("p.jsonl", '{"prompt": "\\ud800"}', "p.jsonl:1: not JSON: half of a surr"),
    ("p.jsonl", '{"prompt": 5}', "p.jsonl:1: prompt: got 5, expected a string"),
    ("p.jsonl", '{"prompts": "a"}', "p.jsonl:1: prompts: no such key; did you mean prompt?"),
    ("p.jsonl", '{"prompt": "a", "seed": -1}', "p.jsonl:1: seed: got -1, expected"),
    ("p.jsonl", '{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: got 0, expected"),
    ("p.jsonl", '{"prompt": "a", "num_beams": 1}', "num_beams is set for all prompts"),
    ("p.jsonl", '{"prompt": "a", "max_length": 1}', "max_length is set for all prompts"),
    (
        "p.jsonl",
        '{"prompt": "a", "temperature": 0, "do_sample": true}',
        "p.jsonl:1: temperature=0 is greedy, and do_sample=true samples",
    ),
    ("p.jsonl", '{"prompt": "a", "temperature": -1}', "temperature: got -1, expected a number >"),
    ("p.jsonl", '{"prompt": "a", "top_k": -1}', "top_k: got -1, expected an integer >= 0"),
    ("p.jsonl", '{"prompt": "a", "top_p": 0}', "top_p: got 0, expected a number > 0 and <= 1"),
    ("p.jsonl", '{"prompt": "a", "min_p": 2}', "min_p: got 2, expected a number >= 0 and <= 1"),
    ("p.jsonl", '{"prompt": "a", "do_sample": 1}', "do_sample: got 1, expected true or false"),
    ("p.jsonl", '{"prompt": "a", "repetition_penalty": 0}', "repetition_penalty: got 0, expe"),
    ("p.jsonl", '{"prompt": "a", "stop": [1]}', "stop[0]: got 1, expected a string"),
    ("p.jsonl", '{"prompt": "a", "stop": ["x", ""]}', "stop: an empty string would end"),
    ("p.jsonl", '{"prompt": "a", "logprobs": 101}', "logprobs: got 101, expected"),
    ("p.jsonl", '{"prompt": "a", "priority": 0.5}', "priority: got 0.5, expected an integer"),
    (
        "p.jsonl",
        '{"prompt": "a", "min_new_tokens": 3, "max_new_tokens": 2}',
        "p.jsonl:1: min_new_tokens: got 3, expected at most max_new_tokens=2",
    ),
    ("p.jsonl", '{"prompt": "a", "adapter": "fr"}', "adapter 'fr' needs adapter_path="),
    ("p.json", '{\n"prompt": \n"a" 1}', "p.json:3: not JSON at column 5"),
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
    ("p.csv", 'prompt\n"a\n', "not CSV: unexpected end"),
    ("p.csv", b"prompt\n\xff\n", "is not UTF-8: byte 0xff"),
]


def test_errors_say_where(subtests: pytest.Subtests, read: Read) -> None:
    for name, content, expected in ERRORS:
        with subtests.test(expected):
            with pytest.raises(ConfigError) as caught:
                read(name, content)
            assert expected in str(caught.value)


def test_a_file_of_too_many_prompts_is_refused(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_RECORDS", 2)
    assert len(read("p.jsonl", '"a"\n"b"\n')) == 2
    with pytest.raises(ConfigError, match="more than 2 prompts"):
        read("p.csv", "prompt\na\nb\nc\n")


def test_many_errors_are_reported_at_once_but_not_all(read: Read) -> None:
    with pytest.raises(ConfigError) as caught:
        read("p.jsonl", '{"prompt": 1}\n' * 30)
    assert caught.value.message.startswith("30 errors in p.jsonl:")
    assert "p.jsonl:10: " in caught.value.message and "and 20 more" in caught.value.message
    assert "p.jsonl:11: " not in caught.value.message


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


SAMPLING = ("model=tiny_llama", "predict_data=x", "do_sample=true")


def test_a_default_seed_differs_each_time(resolve: Resolve) -> None:
    config = resolve(*SAMPLING)
    drawn = [with_seed(config).seed for _ in range(4)]
    assert config.seed is None and len(set(drawn)) == 4
    assert all(seed is not None and 0 <= seed < 2**32 for seed in drawn)


def test_random_weights_stay_the_same(resolve: Resolve) -> None:
    config = with_seed(resolve(*SAMPLING))
    assert config.checkpoint_seed == 0
    assert run_modes.from_dict(config.to_dict()) == config  # the run that is written repeats
    assert resolve(*SAMPLING, "seed=5").checkpoint_seed == 5
    assert with_seed(resolve(*SAMPLING, "weights_seed=7")).checkpoint_seed == 7


def test_a_prompt_of_its_own_may_sample(resolve: Resolve) -> None:
    Path("p.jsonl").write_text('{"prompt": "x", "do_sample": true}')
    Path("greedy.jsonl").write_text('{"prompt": "x"}')
    for own in ("do_sample: true", "temperature: 0.5"):
        inline = f"predict_data=[a, {{prompt: x, {own}}}]"
        assert with_seed(resolve("model=tiny_llama", inline)).seed is not None
    for name, drawn in (("p", True), ("greedy", False)):
        config = resolve("model=tiny_llama", f"predict_data={name}.jsonl")
        assert (with_seed(config).seed is not None) is drawn
    by_hand = ["model=tiny_llama", "predict_data=p.jsonl", "backend=mslite", "infer.rank_id=1"]
    with pytest.raises(ConfigError, match="get the seed that another process draws"):
        resolve(*by_hand)
    assert resolve(*by_hand, "seed=1").seed == 1


@each("model", ["tiny_llama", "tiny_qwen2"])
@each("given", ["", "do_sample=", "temperature=0.5 do_sample=", "top_k=3"])
@each("asked", ["", "true", "false"])
def test_a_run_samples_where_its_options_do(
    resolve: Resolve, model: str, given: str, asked: str
) -> None:
    words = [f"{one}{asked}" if one.endswith("=") else one for one in given.split() if asked]
    words += [f"model.model_config.do_sample={asked}"] if asked else []
    config = resolve(f"model={model}", "predict_data=x", *words)
    assert config.samples is config.generation().do_sample


def test_only_sampling_needs_a_seed(resolve: Resolve) -> None:
    for config in (
        resolve("model=tiny_llama", "predict_data=x"),
        resolve(*SAMPLING, "seed=0"),
        resolve("model=tiny_llama", "run_mode=export"),
    ):
        assert with_seed(config) == config
