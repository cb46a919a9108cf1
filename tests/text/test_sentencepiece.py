from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from lite_runner.errors import ArtifactError
from lite_runner.text import load_tokenizer
from lite_runner.text.sentencepiece import build_tokenizer, read_model
from tests.each import each

Model = Callable[..., Path]
OPTIONS: dict[str, dict[str, Any]] = {
    "as llama": {},
    "no prefix": {"add_dummy_prefix": False},
    "own symbols": {"add_dummy_prefix": False, "user_defined_symbols": ["<user>", "[X]"]},
    "no bytes": {"byte_fallback": False},
    "spaces": {"remove_extra_whitespaces": True},
    "spaces, no prefix": {"remove_extra_whitespaces": True, "add_dummy_prefix": False},
    "spaces nfkc": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
    "unigram": {"model_type": "unigram"},
    "unigram nfkc": {
        "model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "byte_fallback": False,
        "remove_extra_whitespaces": True,
    },
}  # fmt: skip


def mixtures(texts: list[str]) -> list[str]:
    source = random.Random(0)
    words = [word for text in texts for word in text.split(" ")] + ["<user>", "[X]"]
    letters = "".join(texts)
    gaps = ["", " ", "  ", "\n", " \t", "\u00a0"]
    mixed = [source.choice(gaps).join(source.choices(words, k=6)) for _ in range(150)]
    return [*texts, *mixed, *("".join(source.choices(letters, k=15)) for _ in range(150))]


@each("kind", ["as llama", "no prefix", "spaces", "spaces, no prefix"])
@each("once", [False, True])
def test_white_space_is_the_librarys(sentencepiece_model: Model, kind: str, once: bool) -> None:
    """At both ends, alone, and where the prefix only starts the text (legacy=false)."""
    path = sentencepiece_model(**OPTIONS[kind])
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = build_tokenizer(read_model(path, space_after_special=not once), source="test")
    words = ["a", "the", " ", "\n", "\t", "\u00a0", "\u3000"]
    for count in range(4):
        for split in itertools.product(words, repeat=count):
            text = "".join(split)
            assert ours.encode(text).ids == library.EncodeAsIds(text), repr(text)


@pytest.mark.parametrize("kind", OPTIONS)
def test_same_ids_and_texts_as_the_library(
    sentencepiece_model: Model, texts: list[str], kind: str
) -> None:
    path = sentencepiece_model(**OPTIONS[kind])
    library = sentencepiece.SentencePieceProcessor()
    library.Load(str(path))
    tokenizer = load_tokenizer(path, model_vocab=library.vocab_size())
    cases = mixtures(texts)
    if "nfkc" in kind:  # compiled rules over combining marks: a known difference
        cases = [text for text in cases if text.isascii()]
    for text in cases:
        ids = library.EncodeAsIds(text)
        ours = tokenizer.encode(text, add_special_tokens=False)
        if "unigram" in kind and ours != ids:  # so are splits of the same total score
            totals = [sum(library.GetScore(id) for id in split) for split in (ours, ids)]
            assert totals[0] == pytest.approx(totals[1], abs=1e-3), text
        else:
            assert ours == ids, text
        if library.unk_id() not in ids:
            assert tokenizer.decode(ids) == library.DecodeIds(ids)


def test_special_tokens_come_from_the_model(sentencepiece_model: Model) -> None:
    tokenizer = load_tokenizer(sentencepiece_model(), model_vocab=None)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.pad_token_id is None
    assert tokenizer.encode("Hello")[0] == 1
    assert tokenizer.encode("Hello")[1:] == tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello</s>")[-1] == 2
    assert tokenizer.decode([1, *tokenizer.encode("Hello", False), 2]) == "Hello"


def test_the_config_beside_it_is_read(sentencepiece_model: Model, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model().read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "pad_token": "<pad>", "chat_template": "x", "legacy": false,'
        ' "added_tokens_decoder": {"460": {"content": "<pad>", "special": true}}}',
        encoding="utf-8",
    )
    tokenizer = load_tokenizer(tmp_path, model_vocab=None)
    assert tokenizer.pad_token_id == 460
    assert tokenizer.bos_token_id == 1
    assert 1 not in tokenizer.encode("Hello")
    assert tokenizer.has_chat_template


def test_the_prefix_after_special_tokens(sentencepiece_model: Model) -> None:
    """It follows each of them in older tokenizers, and only starts the text in newer ones."""
    path = sentencepiece_model()
    old = build_tokenizer(read_model(path), source="test")
    new = build_tokenizer(read_model(path, space_after_special=False), source="test")
    assert old.encode("the</s>the").tokens == ["\u2581the", "</s>", "\u2581the"]
    assert new.encode("the</s>the").tokens[:2] == ["\u2581the", "</s>"]
    assert new.encode("the</s>the").tokens[2] != "\u2581the"


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"", b"{}", b"\x00" * 100])
def test_broken_model(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ArtifactError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path, model_vocab=None)


def test_a_truncated_model(sentencepiece_model: Model, tmp_path: Path) -> None:
    data = sentencepiece_model().read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match="not a sentencepiece model"):
        load_tokenizer(tmp_path, model_vocab=None)


def test_other_kinds_of_models_are_refused(sentencepiece_model: Model) -> None:
    path = sentencepiece_model(model_type="char", byte_fallback=False, vocab_size=80)
    with pytest.raises(ArtifactError, match="type CHAR, not UNIGRAM or BPE"):
        load_tokenizer(path, model_vocab=None)


def test_contradicting_vocabularies(sentencepiece_model: Model) -> None:
    vocabulary = read_model(sentencepiece_model())
    with pytest.raises(ArtifactError, match="three must be of one length"):
        build_tokenizer(replace(vocabulary, scores=[0.0]), source="test")
    with pytest.raises(ArtifactError, match=r"test: not a sentencepiece model: .*charsmap"):
        build_tokenizer(replace(vocabulary, character_map=b"\1"), source="test")
    assert not vocabulary.unigram
    long = [*vocabulary.pieces[:-1], "~" * 20_000]
    with pytest.raises(ArtifactError, match="the splits of its tokens have 400,"):
        build_tokenizer(replace(vocabulary, pieces=long), source="test")
    twice = [*vocabulary.pieces[:-1], vocabulary.pieces[5]]
    with pytest.raises(ArtifactError, match=r"1 of \d+ pieces occur twice"):
        build_tokenizer(replace(vocabulary, pieces=twice), source="test")


@pytest.mark.parametrize("first", ["bos", "eos", "pad", "unk"])
def test_a_special_token_may_be_the_first_of_all(sentencepiece_model: Model, first: str) -> None:
    """0 is an id as any other; -1 says that there is none."""
    ids = {"bos": 1, "eos": 2, "unk": 3, "pad": -1} | {first: 0}
    path = sentencepiece_model(**{f"{name}_id": id for name, id in ids.items()})
    special = read_model(path).special
    assert (special.bos, special.eos, special.unk) == ("<s>", ("</s>",), "<unk>")
    assert special.pad == ("<pad>" if first == "pad" else None)
    without = {"bos_id": -1, "eos_id": -1, "pad_id": -1, "unk_id": 0}
    special = read_model(sentencepiece_model(**without)).special
    assert (special.bos, special.eos, special.pad) == (None, (), None)


def test_line_breaks_of_iflytekspark_and_words_of_pangualpha(
    sentencepiece_model: Model, texts: list[str]
) -> None:
    path = sentencepiece_model(
        add_dummy_prefix=False,
        user_defined_symbols=["<ret>", "<end>", "<User>", "<Bot>"],
        pad_id=3,
        pad_piece="<pad>",
    )
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = load_tokenizer(path, model_vocab=None, spelling="breaks")
    for text in ["<User> a\n\tb<end><Bot> ", "\n", *texts]:
        ids = library.EncodeAsIds(text.replace("\n", "<ret>").replace("\t", " " * 4))
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert library.unk_id() in ids or tokenizer.decode(ids) == text.replace("\t", " " * 4)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chat = tokenizer.render_chat([*turns, *turns[:1]])
    assert chat == "<User> a<end><Bot> b<end><User> a<end><Bot> "
    assert library.PieceToId("<end>") in tokenizer.eos_token_ids
    with pytest.raises(ArtifactError, match="in turns, and no system"):
        tokenizer.render_chat([{"role": "system", "content": "a"}])
    with pytest.raises(ArtifactError, match="jieba"):
        load_tokenizer(path, model_vocab=None, spelling="words")
    # The same pieces are any other's own.
    plain = load_tokenizer(path, model_vocab=None)
    assert plain.encode("<ret>\ta", add_special_tokens=False) == library.EncodeAsIds("<ret>\ta")
