"""ChatGLM-6B's tokenizer, against the sentencepiece library as the model's own code uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece

from lite_runner import ChatGLMTokenizer
from lite_runner.errors import ArtifactError
from lite_runner.text.loading import load_tokenizer
from lite_runner.text.tokenizer import Tokenizer
from tests.paths import FIXTURES
from tests.tokenizer_files import write_tokenizer

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


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece(
    text: str, tokenizer: Tokenizer, theirs: sentencepiece.SentencePieceProcessor
) -> None:
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
