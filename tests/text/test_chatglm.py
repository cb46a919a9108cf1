from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lite_runner import AutoTokenizer, ChatGLM2Tokenizer, ChatGLM3Tokenizer, ChatGLMTokenizer
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer
from tests.paths import FIXTURES
from tests.tokenizer_files import write_tokenizer

# ruff: noqa: RUF001  (full-width colons)


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
    """The results of sentencepiece, and the ids of the special tokens after its pieces."""

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
    tokenizer = load_tokenizer(folder / "tokenizer.model", model_vocab=None, chat_form="chatglm2")
    assert tokenizer.chat_form == "chatglm2"


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
    prompt = (
        "Answer the following questions as best as you can. You have access to the following"
        ' tools:\n[\n    {\n        "name": "clock",\n        "description": "时间"\n    }\n]'
    )
    asked = tokenizer.render_chat(CHAT[:1], tools=tools)
    assert asked == f"[gMASK]sop<|system|>\n{prompt}<|user|>\n你好<|assistant|>"
    system = {"role": "system", "content": "Be brief."}
    asked = tokenizer.render_chat([system, *CHAT[:1]], tools=tools)
    assert asked == f"[gMASK]sop<|system|>\nBe brief.\n{prompt}<|user|>\n你好<|assistant|>"
    with_tools = [{"role": "system", "content": prompt}, *CHAT[:1]]
    for listed in (tools, [function]):  # as OpenAI's protocol has them, and as the model does
        assert tokenizer.encode_chat(CHAT[:1], tools=listed) == tokenizer.encode_chat(with_tools)
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


def test_invalid_vocabularies_are_refused(model_folder: Folder, tmp_path: Path) -> None:
    tokenizer: Tokenizer = load_tokenizer(model_folder(), model_vocab=None)
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads(tokenizer.files()["tokenizer.json"])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 9999, "content": "sop"})
    (other / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"has the id .*, expected .* behind the .* pieces"):
        load_tokenizer(other, model_vocab=None, chat_form="chatglm3")


BLANKS = [f"<|blank_{count}|>" for count in range(2, 81)]
CONTROL = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
TEXTS = [
    "The ship left the harbour",
    "  two leading, then three   within, and a tail ",
    "a line\nand\tanother\n\n    four before",
    "\nat once",
    "\t",
    " " * 170 + "x",
    "<n> typed",
    " one before and one behind ",
    "a" + " " * 81 + "b" + " " * 80 + "c",
    "rare: \u4f60\u597d \U0001f600",
    "",
]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ice_text.model: a small one of the form of the published."""
    folder = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.Train(
        input=str(FIXTURES / "text/lighthouse.txt"),
        model_prefix=str(folder / "ice_text"),
        model_type=request.param,
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=3,
        user_defined_symbols=["<n>", "<|tab|>", *BLANKS],
        control_symbols=CONTROL,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "ice_text.vocab").unlink()
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, model_vocab=None)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(str(folder / "ice_text.model"))


def spelled(text: str) -> str:
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    for count in range(80, 1, -1):
        text = text.replace(" " * count, f"<|blank_{count}|>")
    return text


def test_ids_are_those_of_sentencepiece(
    subtests: pytest.Subtests, tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor
) -> None:
    for text in TEXTS:
        with subtests.test(text=text):
            ids = tokenizer.encode(text)
            ending = [theirs.PieceToId("[gMASK]"), theirs.PieceToId("<sop>")]
            assert ids == theirs.EncodeAsIds(spelled(text)) + ending
            assert tokenizer.encode(text, add_special_tokens=False) == ids[:-2]
            assert tokenizer.decode(ids) == text.replace("<n>", "\n")


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_of(tokenizer.bos_token_id or 0) == "<sop>"
    assert [tokenizer.token_of(id) for id in tokenizer.eos_token_ids] == ["<eop>"]
    assert tokenizer.pad_token_id == 3


def test_survives_being_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path, model_vocab=None)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert again.spelling is not None and again.chat_template == tokenizer.chat_template


def test_by_the_name_of_mindformers(folder: Path, tokenizer: Tokenizer) -> None:
    found = ChatGLMTokenizer(vocab_file=str(folder / "ice_text.model"))
    assert found("Hello")["input_ids"] == tokenizer.encode("Hello")
    assert ChatGLMTokenizer.from_pretrained(folder).pad_token_id == 3


def test_chat(tokenizer: Tokenizer) -> None:
    def user(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    def model(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    assert tokenizer.encode_chat([user("Hello\n")]) == tokenizer.encode("Hello\n")
    rounds = [user("Hi"), model("Ho"), user("Why?"), model("So"), user("Oh")]
    ask, answer = "\u95ee\uff1a", "\u7b54\uff1a"
    wanted = (
        f"[Round 0]\n{ask}Hi\n{answer}Ho\n[Round 1]\n{ask}Why?\n{answer}So\n"
        f"[Round 2]\n{ask}Oh\n{answer}"
    )
    assert tokenizer.encode_chat(rounds) == tokenizer.encode(wanted)
    for wrong in ([{"role": "system", "content": "Be brief"}, user("Hi")], [user("a"), user("b")]):
        with pytest.raises(ArtifactError, match="expected user and assistant in turns"):
            tokenizer.encode_chat(wrong)


@pytest.mark.parametrize(
    "setting", [{"num_image_tokens": 20000}, {"do_lower_case": True}, {"remove_space": True}]
)
def test_settings_that_change_ids_are_refused(
    setting: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "ice_text.model").write_bytes((folder / "ice_text.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(setting))
    with pytest.raises(ArtifactError, match=f"{next(iter(setting))} is"):
        load_tokenizer(tmp_path, model_vocab=None)
