from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, trainers

from lite_runner.errors import ArtifactError
from lite_runner.text import StreamDecoder, Tokenizer, load_tokenizer
from lite_runner.text.gguf import (
    PRE_TOKENIZERS,
    LazyTokenizer,
    _byte_level_bpe,
    _Fields,
    gguf_tokenizer,
)
from lite_runner.text.sentencepiece import PieceType, read_model
from lite_runner.text.tokenizer import SpecialTokens
from lite_runner.weights.formats.gguf_file import read_header
from tests.paths import FIXTURES, ROOT
from tests.tokenizer_files import write_tokenizer

FIXTURE = FIXTURES / "tokenizers/smollm2.json"
Write = Callable[..., Path]


@pytest.fixture
def bpe_keys(byte_level: tokenizers.Tokenizer) -> dict[str, Any]:
    """The GGUF keys of the byte-level vocabulary."""
    content = json.loads(byte_level.to_str())
    vocab = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "eos_token_id": 0,
        "bos_token_id": 1,
    }


def test_byte_level(
    write_gguf: Write, bpe_keys: dict[str, Any], byte_level: tokenizers.Tokenizer, texts: list[str]
) -> None:
    tokenizer = load_tokenizer(write_gguf(**bpe_keys, chat_template="{{ 1 }}"), model_vocab=400)
    assert tokenizer.vocab_size == byte_level.get_vocab_size()
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.render_chat([]) == "1"
    for text in [*texts, "a<|endoftext|>b"]:
        assert tokenizer.encode(text) == byte_level.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text), False) == text


def check_first_texts(fields: _Fields, texts: list[str], odd: Collection[str] = ()) -> None:
    """The first text of a tokenizer, which but for `odd` ones is encoded by a part of it, has the
    ids of the whole."""
    whole = _byte_level_bpe(fields)
    for text in [*texts, *odd]:
        lazy = LazyTokenizer(fields)
        (found,) = lazy.encode_batch([text])
        (expected,) = whole.encode_batch([text])
        assert (found.ids, found.offsets) == (expected.ids, expected.offsets), text
        assert (lazy._whole is None) == (text not in odd), text
    lazy = LazyTokenizer(fields)
    for text in texts[:2]:
        assert lazy.encode_batch([text])[0].ids == whole.encode_batch([text])[0].ids
    assert lazy.get_added_tokens_decoder() == whole.get_added_tokens_decoder()
    tokens = [*fields.tokens, "not a token"]
    assert list(map(lazy.token_to_id, tokens)) == list(map(whole.token_to_id, tokens))
    ids = range(len(tokens))
    assert list(map(lazy.id_to_token, ids)) == list(map(whole.id_to_token, ids))
    assert lazy.get_vocab() == whole.get_vocab()


def test_the_first_text_is_encoded_as_by_all_tokens(
    write_gguf: Write, bpe_keys: dict[str, Any], texts: list[str]
) -> None:
    texts = [*texts, "", "a<|endoftext|>b<|bos|><|bos|> c", "cafe\u0301 \x00\n\n 12345"]
    long = ["the " * 2000, "ab" * 40]
    lacking = [one for one in bpe_keys["tokens"] if "e" not in one]
    merges = [one for one in bpe_keys["merges"] if "e" not in one]
    for pair in ("th", "hs"):  # made where the letter between them is left out
        if pair not in lacking:
            lacking.append(pair)
            merges.append(" ".join(pair))
    without_a_letter = {"tokens": lacking, "merges": merges, "token_type": [1] * len(lacking)}
    del bpe_keys["eos_token_id"], bpe_keys["bos_token_id"]
    for pre in PRE_TOKENIZERS:
        path = write_gguf(**{**bpe_keys, "pre": pre})
        check_first_texts(_Fields(read_header(path).metadata, str(path)), texts, long)
        path = write_gguf(**{**bpe_keys, **without_a_letter, "pre": pre})
        fields = _Fields(read_header(path).metadata, str(path))
        path.write_bytes(b"")  # what is read is not read again
        check_first_texts(fields, ["that this"], ["thes hes", *long])


@pytest.mark.parametrize(
    "pre, digits, words",
    [
        ("default", ["1234"], ["don", "'t", " stop"]),
        ("smollm", ["1", "2", "3", "4"], ["don", "'t", " stop"]),
        ("llama-bpe", ["123", "4"], ["don", "'t", " stop"]),
        ("qwen2", ["1", "2", "3", "4"], ["don", "'t", " stop"]),
        ("bloom", ["1234"], ["don't", " stop"]),
    ],
)
def test_pre_tokenizers(
    write_gguf: Write, bpe_keys: dict[str, Any], pre: str, digits: list[str], words: list[str]
) -> None:
    tokenizer = load_tokenizer(write_gguf(**{**bpe_keys, "pre": pre}), model_vocab=None)
    split = tokenizer._backend.pre_tokenizer.pre_tokenize_str
    assert [piece for piece, _ in split("1234")] == digits
    assert [piece.replace("\u0120", " ") for piece, _ in split("don't stop")] == words
    assert tokenizer.decode(tokenizer.encode("don't stop 1234"), True) == "don't stop 1234"


@pytest.mark.parametrize(("pre", "composed"), [("qwen2", True), ("llama-bpe", False)])
def test_qwen_composes_letters_as_in_training(
    write_gguf: Write, bpe_keys: dict[str, Any], pre: str, composed: bool
) -> None:
    """Qwen's own tokenizer.json (of Qwen2 and Qwen2.5) has the normalizer NFC, and its first one
    called unicodedata.normalize. A GGUF has no key for it: llama.cpp and transformers 5.23 leave
    it out when they read one, and give the model letters that it was not trained with."""
    tokenizer = load_tokenizer(write_gguf(**{**bpe_keys, "pre": pre}), model_vocab=None)
    accent, letter = "cafe\u0301", "caf\u00e9"
    assert (tokenizer.encode(accent) == tokenizer.encode(letter)) == composed


@pytest.mark.parametrize(
    "keys, before, after",
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ({"pre": "llama-bpe"}, [1], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ],
)
def test_added_special_tokens(
    write_gguf: Write, bpe_keys: dict[str, Any], keys: dict[str, Any], before: Any, after: Any
) -> None:
    tokenizer = load_tokenizer(write_gguf(**{**bpe_keys, **keys}), model_vocab=None)
    assert tokenizer.encode("x") == before + tokenizer.encode("x", False) + after


def test_several_tokens_end_a_text(write_gguf: Write, bpe_keys: dict[str, Any]) -> None:
    path = write_gguf(**bpe_keys, eot_token_id=1, eom_token_id=0)
    assert load_tokenizer(path, model_vocab=None).eos_token_ids == (0, 1)


@pytest.mark.parametrize("token", ["<|call|>", "<|tool_response>", "<turn|>"])
def test_a_call_ends_a_text(write_gguf: Write, bpe_keys: dict[str, Any], token: str) -> None:
    keys = bpe_keys | {"tokens": [*bpe_keys["tokens"], token]}
    types = [PieceType.NORMAL] * len(bpe_keys["tokens"])
    for kind in (PieceType.CONTROL, PieceType.USER_DEFINED, PieceType.NORMAL):
        path = write_gguf(**keys | {"token_type": [*types, kind]})
        ends = (0,) if kind == PieceType.NORMAL else (0, len(types))
        assert load_tokenizer(path, model_vocab=None).eos_token_ids == ends


def test_merges_over_spelled_spaces(tmp_path: Path, texts: list[str], write_gguf: Write) -> None:
    """Gemma 4's, as its tokenizer.json has it, written and read."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special[:5])
    backend.train_from_iterator([text.replace("\u4f60", "") for text in texts], trainer)
    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    for byte in special[5:]:
        vocab.setdefault(byte, len(vocab))
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    own = Tokenizer(backend, SpecialTokens(bos="<bos>", eos=("<eos>",)), source="a test's")
    keys = gguf_tokenizer(own)
    assert keys["tokenizer.ggml.model"] == "gemma4"
    short = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items()}
    found = load_tokenizer(write_gguf(**short), model_vocab=None)
    assert found.eos_token_ids == (own.id_of("<eos>"), own.id_of("<turn|>"))
    for text in (*texts, "a<turn|>\n\n\nb", "  \u4f60 \U0001f600"):
        ids = found.encode(text, False)
        assert ids == own.encode(text, False)
        assert found.decode(ids) == text.replace("<turn|>", "")


def test_sentencepiece(
    write_gguf: Write, sentencepiece_model: Callable[..., Path], texts: list[str]
) -> None:
    model = sentencepiece_model()
    vocabulary = read_model(model)
    keys = {
        "model": "llama",
        "tokens": list(vocabulary.pieces),
        "scores": list(vocabulary.scores),
        "token_type": list(vocabulary.types),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    library = sentencepiece.SentencePieceProcessor()
    library.Load(str(model))
    tokenizer = load_tokenizer(write_gguf(**keys), model_vocab=None)
    for text in texts:
        assert tokenizer.encode(text) == [1, *library.EncodeAsIds(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    bare = load_tokenizer(
        write_gguf(**keys, add_space_prefix=False, add_bos_token=False), model_vocab=None
    )
    assert bare.decode(bare.encode("the the")) == "the the"
    assert bare.encode("the") != tokenizer.encode("the", False)
    del keys["scores"]
    with pytest.raises(ArtifactError, match="0 scores"):
        load_tokenizer(write_gguf(**keys), model_vocab=None)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"model": "bert"}, "tokenizer of kind 'bert'"),
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' is not known; these are: default"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "1 tokens occur twice"),
        ({"token_type": [1]}, "types"),
        ({"merges": ["zzz yyy"]}, "broken vocabulary"),
        ({"merges": [1, 2]}, "no list of strings tokenizer.ggml.merges"),
        ({"eos_token_id": 5000}, "eos_token_id is 5000, beyond"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', expected a int"),
        ({"token_type": ["a"]}, "expected numbers"),
    ],
)
def test_broken_keys(
    write_gguf: Write, bpe_keys: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        load_tokenizer(write_gguf(**{**bpe_keys, **keys}), model_vocab=None)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"pre": "llama-bpe"},
        {"pre": "smollm", "add_bos_token": True, "add_eos_token": True},
        {"pre": "qwen2", "padding_token_id": 0, "unknown_token_id": 1},
    ],
)
def test_its_files_are_the_same_tokenizer(
    write_gguf: Write, bpe_keys: dict[str, Any], texts: list[str], keys: dict[str, Any]
) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}\u2581\n"
    path = write_gguf(**{**bpe_keys, **keys}, chat_template=template)
    tokenizer = load_tokenizer(path, model_vocab=None)
    again = reloaded(tokenizer, path.parent / "files")
    assert_same(again, tokenizer, [*texts, "a<|endoftext|>b"])
    chat = [{"role": "user", "content": "Hi"}]
    assert again.render_chat(chat) == tokenizer.render_chat(chat)
    assert again.encode_chat(chat) == tokenizer.encode_chat(chat)


@pytest.mark.parametrize(
    "pre",
    [
        *("gpt-2", "smollm", "llama-bpe", "qwen2", "chatglm-bpe", "bloom", "none of these"),
        *("falcon", "seed-coder", "gpt-4o", "deepseek-v3"),
    ],
)
def test_a_folder_as_the_keys_of_a_gguf_file(
    write_gguf: Write, bpe_keys: dict[str, Any], texts: list[str], pre: str
) -> None:
    known = pre if pre in PRE_TOKENIZERS else "gpt-2"
    keys = {**bpe_keys, "pre": known, "padding_token_id": 0, "add_bos_token": True}
    path = write_gguf(**keys, chat_template="{{ 1 }}")
    tokenizer = load_tokenizer(path, model_vocab=None)
    # Of its own file all keys are kept.
    assert gguf_tokenizer(tokenizer)["tokenizer.ggml.merges"] == bpe_keys["merges"]
    folder = path.parent / "files"
    again = reloaded(tokenizer, folder)
    if pre != known:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content["pre_tokenizer"]["add_prefix_space"] = True
        file.write_text(json.dumps(content))
        with pytest.raises(ArtifactError, match="no pre-tokenizer that llama"):
            gguf_tokenizer(load_tokenizer(folder, model_vocab=None))
        return
    found = gguf_tokenizer(again)
    assert found["tokenizer.ggml.pre"] == pre
    assert found["tokenizer.ggml.add_bos_token"] and not found["tokenizer.ggml.add_eos_token"]
    written = {key.removeprefix("tokenizer.ggml."): one for key, one in found.items()}
    template = written.pop("tokenizer.chat_template")
    third = load_tokenizer(write_gguf(**written, chat_template=template), model_vocab=None)
    assert_same(third, tokenizer, [*texts, "a<|endoftext|>b"])
    assert third.render_chat([]) == "1"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("command-r", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " DON", "'", "T", "//", "\n"]),
        ("falcon", ["HelloWorld", "'", "s", " ", "123", "4", " DON", "'", "T", "//", "\n"]),
        ("stablelm2", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " DON", "'T", "//\n"]),
        ("seed-coder", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " DON", "'T", "//", "\n"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "4", " DON'T", "//\n"]),
        ("deepseek-v3", ["HelloWorld", "'s", " ", "123", "4", " DON", "'T", "//\n"]),
    ],
)
def test_texts_are_split_by_the_patterns_of_llama_cpp(pre: str, pieces: list[str]) -> None:
    found = PRE_TOKENIZERS[pre]().pre_tokenize_str("HelloWorld's 1234 DON'T//\n")
    plain = str.maketrans({"\u0120": " ", "\u010a": "\n"})  # bytes as GPT-2 spells them
    assert [piece.translate(plain) for piece, _ in found] == pieces


def test_a_sentencepiece_folder_is_no_gguf_tokenizer(
    sentencepiece_model: Callable[..., Path],
) -> None:
    tokenizer = load_tokenizer(sentencepiece_model(), model_vocab=None)
    with pytest.raises(ArtifactError, match="cannot hold this tokenizer: it is neither"):
        gguf_tokenizer(tokenizer)


@pytest.mark.parametrize("space", [True, False])
def test_the_files_of_a_sentencepiece_vocabulary(
    write_gguf: Write, sentencepiece_model: Callable[..., Path], texts: list[str], space: bool
) -> None:
    vocabulary = read_model(sentencepiece_model())
    path = write_gguf(
        model="llama",
        tokens=list(vocabulary.pieces),
        scores=list(vocabulary.scores),
        token_type=list(vocabulary.types),
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=space,
    )
    tokenizer = load_tokenizer(path, model_vocab=None)
    again = reloaded(tokenizer, path.parent / "files")
    assert again.spelling is not None  # so that it streams byte by byte
    assert_same(again, tokenizer, texts)
    assert not again.has_chat_template


def reloaded(tokenizer: Tokenizer, folder: Path) -> Tokenizer:
    """The tokenizer that a folder with the files of `tokenizer` holds."""
    folder.mkdir()
    write_tokenizer(tokenizer, folder)
    return load_tokenizer(folder, model_vocab=tokenizer.vocab_size)


def assert_same(one: Tokenizer, other: Tokenizer, texts: list[str]) -> None:
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "pad_token_id"):
        assert getattr(one, name) == getattr(other, name), name
    for text in texts:
        ids = other.encode(text)
        assert one.encode(text) == ids
        for skip in (True, False):
            assert one.decode(ids, skip) == other.decode(ids, skip)


def test_a_gguf_without_tokenizer(write_gguf: Write) -> None:
    with pytest.raises(ArtifactError, match=r"no list of strings tokenizer") as caught:
        load_tokenizer(write_gguf(), model_vocab=None)
    assert "processor.tokenizer.tokenizer_file=" in caught.value.hint


def test_smollm2_as_transformers(smollm2_gguf: Path) -> None:
    tokenizer = load_tokenizer(smollm2_gguf, model_vocab=49152)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 2)
    fixture = json.loads(FIXTURE.read_text(encoding="utf-8"))
    assert len(fixture["texts"]) > 40
    for case in fixture["texts"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        decoder = StreamDecoder(tokenizer)
        pieces = [decoder.put(id) for id in case["ids"]]
        assert "".join(pieces) + decoder.finish() == case["decoded"]
    for chat in fixture["chats"]:
        assert tokenizer.render_chat(chat["messages"], chat["prompt"]) == chat["text"]
        assert tokenizer.encode_chat(chat["messages"], chat["prompt"]) == chat["ids"]
    pages = [(ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md")]
    parts = [page[start : start + 2000] for page in pages for start in range(0, len(page), 2000)]
    fields = _Fields(read_header(smollm2_gguf).metadata, str(smollm2_gguf))
    check_first_texts(fields, [*(case["text"] for case in fixture["texts"]), *parts])
