# ruff: noqa: RUF001  (full-width colons)
from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lite_runner import AutoTokenizer, ChatGLM2Tokenizer, ChatGLM3Tokenizer
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text.loading import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer
from tests.tokenizer_files import write_tokenizer

ROUND = "[Round 1]\n\n问：你好\n\n答：世界\n\n[Round 2]\n\n问：今天\n\n答："
CHAT = [
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "世界"},
    {"role": "user", "content": "今天"},
]
Folder = Callable[..., Path]


@pytest.fixture
def model_folder(tmp_path: Path, sentencepiece_model: Callable[..., Path]) -> Folder:
    """`model_folder(tokenizer_class=...)`: a tokenizer.model with these keys beside it."""

    def make(**config: Any) -> Path:
        shutil.copy(sentencepiece_model(split_digits=False), tmp_path / "tokenizer.model")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path

    return make


class Expected:
    """What sentencepiece gives, and the ids of the special tokens behind its pieces."""

    def __init__(self, folder: Path) -> None:
        self.library = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        first = self.library.get_piece_size()
        names = "[MASK] [gMASK] [sMASK] sop eop system user assistant observation".split()
        self.ids = {name: first + place for place, name in enumerate(names)}
        self.prefix = [self.ids["[gMASK]"], self.ids["sop"]]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.library.encode(text)
        return ids


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"tokenizer_class": "ChatGLMTokenizer"}, "chatglm2"),
        ({"tokenizer_class": "ChatGLMTokenizer", "chat_template": "{{ x }}"}, "chatglm3"),
        ({"tokenizer_class": "ChatGLMTokenizer", "name_or_path": "x/chatglm3-6b"}, "chatglm3"),
        ({"tokenizer_class": "LlamaTokenizer"}, None),
    ],
)
def test_the_folder_tells_the_form(
    config: dict[str, Any], form: str | None, model_folder: Folder
) -> None:
    folder = model_folder(**config)
    assert load_tokenizer(folder, model_vocab=None).chat_form == form
    told = load_tokenizer(folder / "tokenizer.model", model_vocab=None, chat_form="chatglm2")
    assert told.chat_form == "chatglm2"


def test_prompts_begin_with_two_tokens_and_typed_ones_stay_text(
    model_folder: Folder, texts: list[str]
) -> None:
    folder = model_folder(tokenizer_class="ChatGLMTokenizer")
    expected, tokenizer = Expected(folder), load_tokenizer(folder, model_vocab=None)
    for text in [*texts, "Bishop says sop", "<|user|> </s> [gMASK] <unk>"]:
        assert tokenizer.encode(text) == expected.prefix + expected.encode(text)
        assert tokenizer.encode(text, False) == expected.encode(text)
    assert tokenizer.eos_token_ids == (2,) and tokenizer.pad_token_id == 0
    assert tokenizer.vocab_size == expected.library.get_piece_size() + 9
    assert tokenizer.decode(tokenizer.encode("你好，世界！")) == "你好，世界！"


def test_rounds_of_chatglm2(model_folder: Folder) -> None:
    folder = model_folder(tokenizer_class="ChatGLMTokenizer")
    expected, tokenizer = Expected(folder), load_tokenizer(folder, model_vocab=None)
    assert tokenizer.encode_chat(CHAT) == expected.prefix + expected.encode(ROUND)
    assert tokenizer.render_chat(CHAT) == f"[gMASK]sop{ROUND}"
    with pytest.raises(ConfigError, match="message 0 has role 'system', expected user"):
        tokenizer.encode_chat([{"role": "system", "content": "x"}])
    with pytest.raises(ConfigError, match="the last message is the assistant's"):
        tokenizer.encode_chat(CHAT[:2])


def test_roles_of_chatglm3(model_folder: Folder) -> None:
    folder = model_folder(tokenizer_class="ChatGLMTokenizer", chat_template="{{ x }}")
    expected, tokenizer = Expected(folder), load_tokenizer(folder, model_vocab=None)
    chat = [
        {"role": "system", "content": "Hello"},
        {"role": "user", "content": "你好 <|assistant|>"},
        {"role": "assistant", "metadata": "tool", "content": "f(x)"},
        {"role": "observation", "content": "123"},
    ]
    ids, encode = expected.ids, expected.encode
    assert tokenizer.encode_chat(chat) == [
        *expected.prefix,
        *(ids["system"], *encode("\n"), *encode("Hello")),
        *(ids["user"], *encode("\n"), *encode("你好 <|assistant|>")),
        *(ids["assistant"], *encode("tool\n"), *encode("f(x)")),
        *(ids["observation"], *encode("\n"), *encode("123")),
        ids["assistant"],
    ]
    assert tokenizer.encode_chat(chat, False)[-1] != ids["assistant"]
    assert tokenizer.eos_token_ids == (2, ids["user"], ids["observation"])
    with pytest.raises(ConfigError, match="role 'tool', expected one of system, user"):
        tokenizer.encode_chat([{"role": "tool", "content": "x"}])


def test_tools_of_chatglm3(model_folder: Folder) -> None:
    tokenizer = load_tokenizer(model_folder(), model_vocab=None, chat_form="chatglm3")
    function = {"name": "clock", "description": "时间"}
    tools = [{"type": "function", "function": function}]
    told = (
        "Answer the following questions as best as you can. You have access to the following"
        ' tools:\n[\n    {\n        "name": "clock",\n        "description": "时间"\n    }\n]'
    )
    asked = tokenizer.render_chat(CHAT[:1], tools=tools)
    assert asked == f"[gMASK]sop<|system|>\n{told}<|user|>\n你好<|assistant|>"
    system = {"role": "system", "content": "Be brief."}
    asked = tokenizer.render_chat([system, *CHAT[:1]], tools=tools)
    assert asked == f"[gMASK]sop<|system|>\nBe brief.\n{told}<|user|>\n你好<|assistant|>"
    with_tools = [{"role": "system", "content": told}, *CHAT[:1]]
    assert tokenizer.encode_chat(CHAT[:1], tools=tools) == tokenizer.encode_chat(with_tools)
    older = load_tokenizer(model_folder(), model_vocab=None, chat_form="chatglm2")
    with pytest.raises(ConfigError, match="ChatGLM2 knows no tools"):
        older.encode_chat(CHAT, tools=tools)


@pytest.mark.parametrize("form", ["chatglm2", "chatglm3"])
def test_written_and_read_again(form: Any, model_folder: Folder, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_folder(), model_vocab=None, chat_form=form)
    folder = tmp_path / "written"
    folder.mkdir()
    write_tokenizer(tokenizer.with_special(pad="</s>"), folder)
    again = load_tokenizer(folder, model_vocab=None)
    for one in (tokenizer, again):
        assert one.has_chat_template
        assert one.encode("sop <|user|>") == tokenizer.encode("sop <|user|>")
        assert one.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)
        assert one.eos_token_ids == tokenizer.eos_token_ids


def test_by_the_names_of_mindformers(model_folder: Folder) -> None:
    folder = model_folder()
    expected = Expected(folder)
    older = ChatGLM2Tokenizer(folder / "tokenizer.model")
    newer = ChatGLM3Tokenizer.from_pretrained(folder)
    assert older.encode("Hello") == expected.prefix + expected.encode("Hello")
    assert older.apply_chat_template(CHAT) == older.core.encode_chat(CHAT)
    found = newer.apply_chat_template([CHAT[:1], CHAT], add_generation_prompt=True, padding=True)
    assert found[1] == newer.core.encode_chat(CHAT)
    alone = newer.core.encode_chat(CHAT[:1])
    assert found[0] == alone + [0] * (len(found[1]) - len(alone))


def test_an_explicit_template_wins(model_folder: Folder) -> None:
    folder = model_folder(tokenizer_class="ChatGLMTokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(CHAT, "{{ messages[0].content }}", tokenize=False)
    assert text == "你好"


def test_what_is_none_is_refused(model_folder: Folder, tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(model_folder(), model_vocab=None)
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads(tokenizer.files()["tokenizer.json"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 9999, "content": "sop"})
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"has the id .*, expected .* behind the .* pieces"):
        load_tokenizer(other, model_vocab=None, chat_form="chatglm3")
