"""Examples: records told apart by their keys, their token ids and targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lite_runner.errors import ConfigError
from lite_runner.text import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer, byte_tokenizer
from lite_runner.training.data import ALPACA, ALPACA_INPUT, pieces_of, read_data
from tests.chatglm_folders import write_chatglm3

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'x' %}{{ raise_exception('bad role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer().with_special(chat_template=TEMPLATE)


def written(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records), encoding="utf-8")
    return path


def test_the_completion_and_one_eos_are_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = written(tmp_path, {"prompt": "ab", "completion": "cde"}, {"text": "xyz"})
    data = read_data(path, tokenizer, "alpaca", 100)
    (eos,) = tokenizer.eos_token_ids
    first, second = data.texts
    ids = [*tokenizer.encode("ab", False), *tokenizer.encode("cde", False), eos]
    assert (first.ids.tolist(), first.first_target, first.targets) == (ids, 2, 4)
    # The first token of a text follows nothing.
    assert (second.first_target, second.targets) == (1, 3)
    assert (data.tokens, data.targets, data.truncated, data.dropped) == (10, 7, 0, 0)


def test_some_of_the_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = written(tmp_path, *({"text": "x" * n} for n in range(2, 8)))
    data = read_data(path, tokenizer, "alpaca", 100, skip=1, take=3)
    assert [len(text.ids) for text in data.texts] == [4, 5, 6]
    with pytest.raises(ConfigError, match=r"data.jsonl: no records behind the first 6"):
        read_data(path, tokenizer, "alpaca", 100, skip=6)
    with pytest.raises(ConfigError, match=r"no \.mindrecord file is in this folder"):
        read_data(tmp_path, tokenizer, "alpaca", 100)


def test_truncated_and_dropped_examples_are_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long = {"prompt": "ab", "completion": "c" * 50}
    path = written(tmp_path, long, {"prompt": "a" * 20, "completion": "b"})
    data = read_data(path, tokenizer, "alpaca", 10)
    assert [len(text.ids) for text in data.texts] == [10]
    assert data.summary(10) == (
        "1 of 2 examples, 10 tokens, 8 of them targets, the longest has 10; 2 were cut to 10"
        " tokens; 1 dropped, with nothing to learn in 10 tokens"
    )
    with pytest.raises(ConfigError, match="nothing to learn: of 2 examples 2 have no target"):
        read_data(path, tokenizer, "alpaca", 2)
    with pytest.raises(ConfigError, match=r"finetune\.eval_data: .*data.jsonl: nothing to learn"):
        read_data(path, tokenizer, "alpaca", 2, key="finetune.eval_data")


def test_instructions(tokenizer: Tokenizer) -> None:
    record = {"instruction": "Add {x}.", "input": "1 2", "output": "3"}
    (prompt, learned), answer = pieces_of(record, "x", tokenizer)
    assert prompt == ALPACA_INPUT.format(instruction="Add {x}.", input="1 2")
    assert (learned, answer) == (False, ("3", True))
    bare = {**record, "input": ""}
    assert pieces_of(bare, "x", tokenizer)[0][0] == ALPACA.format(instruction="Add {x}.")
    assert pieces_of(record, "x", tokenizer, "belle")[0][0] == (
        "Human: Add {x}.\n1 2\n\nAssistant: "
    )
    assert pieces_of(record, "x", tokenizer, "none")[0][0] == "Add {x}.\n1 2"


def test_the_answers_of_a_chat_are_learned(tokenizer: Tokenizer) -> None:
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": r, "content": c} for r, c in zip(roles, "abcd", strict=True)]
    assert pieces_of({"messages": messages}, "x", tokenizer) == [
        ("<user>a\n<assistant>", False),
        ("b\n", True),
        ("<user>c\n<assistant>", False),
        ("d", True),
    ]


def test_the_tags_of_a_chatglm_are_tokens(tmp_path: Path) -> None:
    turns = (("user", "Hi"), ("assistant", "Yes"), ("user", ""), ("assistant", "No"))
    messages = [{"role": role, "content": content} for role, content in turns]
    path, folder = written(tmp_path, {"messages": messages}), write_chatglm3(tmp_path / "glm")
    newer = load_tokenizer(folder, model_vocab=None)
    older = load_tokenizer(folder / "tokenizer.model", model_vocab=None, chat_form="chatglm2")
    for tokenizer, answers in ((newer, ("\n", "Yes", "\n", "No")), (older, ("Yes\n\n", "No"))):
        (text,) = read_data(path, tokenizer, "none", 200).texts
        assert text.ids[: text.first_target].tolist() == tokenizer.encode_chat(messages[:1])
        learned = [id for one in answers for id in tokenizer.encode(one, False)]
        assert text.ids[text.rows() + 1].tolist() == [*learned, 2]
        if tokenizer is newer:  # a text of ChatGLM2's is tokenized in parts
            assert text.ids.tolist() == [*tokenizer.encode_chat(messages, False), 2]
    with pytest.raises(ConfigError, match=r"line 1: messages: .* has no chat template"):
        read_data(path, byte_tokenizer(), "none", 200)
    del messages[0]["content"]
    with pytest.raises(ConfigError, match="messages: content: got nothing, expected a string"):
        read_data(written(tmp_path, {"messages": messages}), newer, "none", 200)


def test_lists_and_tables(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = tmp_path / "data.csv"
    table.write_text('prompt,completion\n"a, b",c\nd,e\n', encoding="utf-8")
    listed = tmp_path / "data.json"
    pandas = tmp_path / "pandas.csv"  # as its to_csv writes one: with an index
    pandas.write_text(',prompt,completion\n0,"a, b",c\n1,d,e\n', encoding="utf-8")
    listed.write_text('[{"prompt": "a, b", "completion": "c"}]', encoding="utf-8")
    found = read_data(table, tokenizer, "alpaca", 100).texts
    assert [len(text.ids) for text in found] == [6, 3]
    same = read_data(listed, tokenizer, "alpaca", 100).texts[0]
    assert same.ids.tolist() == found[0].ids.tolist()
    indexed = read_data(pandas, tokenizer, "alpaca", 100).texts
    assert [text.ids.tolist() for text in indexed] == [text.ids.tolist() for text in found]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"question": "x"},
            "line 1: has question; expected an object with text; or prompt and completion",
        ),
        ([1], "line 1: is not an object"),
        ({"prompt": 3, "completion": "x"}, "line 1: prompt: got int, expected a string"),
        ({"completion": "x"}, "line 1: prompt: got nothing, expected a string"),
        ({"messages": "x"}, "messages: expected a list of objects"),
        ({"messages": [{"role": "user", "content": "x"}]}, "none has the role assistant"),
        ({"messages": [], "tools": 1}, "tools: expected a list of objects"),
        ({"messages": [], "tools": ["x"]}, "tools: expected a list of objects"),
        ({"messages": [{"content": "x"}]}, "line 1: messages: role: got nothing, expected a s"),
        (
            {"messages": [{"role": "x"}, {"role": "assistant"}]},
            "the chat template failed: bad role\n  -> check the roles and their order, or prompt",
        ),
    ],
)
def test_records_that_are_no_examples(
    record: Any, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_data(written(tmp_path, record), tokenizer, "alpaca", 100)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text"}\n', "line 2: not valid JSON"),
        ("a.json", b"[1, ", "not valid JSON"),
        ("a.csv", b"text\na,b\n", "line 2: expected 1 columns"),
        ("a.csv", b"prompt,completion\na\n", "line 2: expected 2 columns"),
        ("a.csv", b"text,x,text\na,b,c\n", "a.csv, line 1: 2 columns are called text"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("a.parquet", b"x", "expected a file ending in .jsonl, .json, .csv"),
        ("a.jsonl", b"", "a.jsonl: no records\n  -> a file with examples"),
        ("a.jsonl", None, "No such file or directory"),
    ],
)
def test_files_that_cannot_be_read(
    name: str, content: bytes | None, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_data(path, tokenizer, "alpaca", 100)
    assert message in str(raised.value)
