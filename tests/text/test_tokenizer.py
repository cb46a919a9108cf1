from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.text import byte_tokenizer, load_tokenizer
from lite_runner.text.tokenizer import SpecialTokens, Tokenizer

Folder = Callable[..., Path]


@given(st.text())
def test_byte_tokenizer_is_utf8(text: str) -> None:
    tokenizer = byte_tokenizer()
    if not any(name in text for name in ("<s>", "</s>", "<pad>")):
        assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_byte_tokenizer_special_tokens() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 259
    assert tokenizer.bos_token_id == 256
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.pad_token_id == 258
    assert tokenizer.decode([256, 72, 105, 257, 258]) == "Hi"
    assert tokenizer.decode([256, 72, 105], skip_special_tokens=False) == "<s>Hi"
    assert not tokenizer.has_chat_template


def test_folder_and_file_encode_alike(
    folder: Folder, byte_level: tokenizers.Tokenizer, texts: list[str]
) -> None:
    path = folder(bos_token="<|bos|>", eos_token={"content": "<|endoftext|>", "lstrip": False})
    for tokenizer in (
        load_tokenizer(path, model_vocab=byte_level.get_vocab_size()),
        load_tokenizer(path / "tokenizer.json", model_vocab=None),
    ):
        assert tokenizer.vocab_size == byte_level.get_vocab_size()
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == (0,)
        assert tokenizer.pad_token_id is None
        for text in texts:
            assert tokenizer.encode(text) == byte_level.encode(text).ids
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_of_the_file_are_ignored(folder: Folder) -> None:
    path = folder()
    content = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    tokenizer = load_tokenizer(path, model_vocab=None)
    assert tokenizer.decode(tokenizer.encode("a b c d e"), False) == "a b c d e"


@pytest.mark.parametrize(
    "config, added",
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([1], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [0])),
        ({"add_eos_token": True}, ([], [0])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "bos_token": None}, ([], [])),
    ],
)
def test_added_special_tokens(
    folder: Folder, config: dict[str, Any], added: tuple[list[int], list[int]]
) -> None:
    path = folder(**{"bos_token": "<|bos|>", "eos_token": "<|endoftext|>", **config})
    tokenizer = load_tokenizer(path, model_vocab=None)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    before, after = added
    assert tokenizer.encode("Hello") == before + plain + after


def test_an_added_token_must_exist(folder: Folder) -> None:
    with pytest.raises(ArtifactError, match="'<none>' is not in the vocabulary"):
        load_tokenizer(folder(bos_token="<none>", add_bos_token=True), model_vocab=None)


def test_special_tokens_map_fills_gaps(folder: Folder) -> None:
    path = folder(eos_token="<|bos|>")
    (path / "special_tokens_map.json").write_text(
        '{"bos_token": "<|bos|>", "eos_token": "<|endoftext|>"}', encoding="utf-8"
    )
    tokenizer = load_tokenizer(path, model_vocab=None)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (1,)


def test_tokens_that_only_the_config_knows(folder: Folder) -> None:
    size = load_tokenizer(folder(), model_vocab=None).vocab_size
    path = folder(
        added_tokens_decoder={
            str(size + 1): {"content": "<b>", "special": False},
            str(size): {"content": "<a>", "special": True},
            "0": {"content": "<|endoftext|>", "special": True},
        }
    )
    tokenizer = load_tokenizer(path, model_vocab=None)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<b>"


def test_a_larger_vocabulary_than_the_model_s(folder: Folder) -> None:
    size = load_tokenizer(folder(), model_vocab=None).vocab_size
    load_tokenizer(folder(), model_vocab=size)
    with pytest.raises(ArtifactError, match=f"has {size} ids, .* {size - 1}") as error:
        load_tokenizer(folder(), model_vocab=size - 1)
    assert error.value.exit_code == 4


def test_ids_that_no_vocabulary_has(tmp_path: Path) -> None:
    """To write such a vocabulary, the library counts to its highest id."""
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 2**31}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(
        ArtifactError, match=r"vocab.json: .* 2,147,483,649 ids, at most 16,777,216"
    ):
        load_tokenizer(tmp_path, model_vocab=None)


def test_the_highest_id_counts_not_the_number_of_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 500}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match="has 501 ids"):
        load_tokenizer(tmp_path, model_vocab=100)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":'
        b'{"type":"Precompiled","precompiled_charsmap":"AAAA"},"pre_tokenizer":null,'
        b'"post_processor":null,"decoder":null,"model":{"type":"BPE","vocab":{},"merges":[]}}',
    ],
    ids=["empty", "no model", "array", "binary", "merge", "panic"],
)
def test_broken_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, model_vocab=None)


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object"),
        ('{"eos_token": "a\\ud800"}', "half of a surrogate pair"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ('{"eos_token": 3}', "eos_token is 3, expected a string"),
        ('{"add_bos_token": "yes"}', "add_bos_token is 'yes', expected a bool"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', r"added_tokens_decoder\['x'\]"),
        ('{"added_tokens_decoder": {"9999": {"content": "<n>"}}}', "has id 9999"),
        ('{"added_tokens_decoder": {"%s": {"content": "a"}}}' % ("9" * 5000), r"\['9{20}"),
        ('{"chat_template": 3}', "chat_template is 3"),
        ('{"chat_template": [{"name": "default"}]}', "chat_template is"),
    ],
)
def test_broken_tokenizer_config(folder: Folder, content: str, message: str) -> None:
    path = folder()
    (path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=message):
        load_tokenizer(path, model_vocab=None)


def test_nothing_to_load(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.bin").write_bytes(b"x")
    for path, message in (
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path, "neither tokenizer.json nor tokenizer.model"),
        (tmp_path / "tokenizer.bin", "ends in '.bin'"),
    ):
        with pytest.raises(ArtifactError, match=message) as error:
            load_tokenizer(path, model_vocab=None)
        assert "tokenizer.json" in error.value.hint


def test_invalid_unicode_is_an_error_not_a_crash() -> None:
    with pytest.raises(ConfigError, match="not valid Unicode at character 1"):
        byte_tokenizer().encode("a\udcff")


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert byte_tokenizer().decode([72, 5000, 105]) == "Hi"


EVIL = "(a|a|aa)+$"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _charsmap(text: str) -> dict[str, Any]:
    """SentencePiece's map of characters, with an empty trie, to this text."""
    raw = (8).to_bytes(4, "little") + bytes(8) + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(raw).decode()}


WORDPIECE = {"unk_token": "u", "continuing_subword_prefix": "##", "vocab": {"u": 0}}


def _template(pieces: list[str]) -> dict[str, Any]:
    def piece(name: str) -> dict[str, Any]:
        return {"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}}

    end = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    single = [piece(name) for name in pieces]
    pair = [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": {"</s>": end},
    }


def _sequence(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre_tokenizer": _split(EVIL)}, "the pattern .* matches in several ways"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_split("x"), _split(EVIL)]}},
            "the pattern .* matches in several ways",
        ),
        ({"normalizer": _replace({"Regex": EVIL}, "")}, "the pattern .* matches in several ways"),
        ({"decoder": _replace({"Regex": EVIL}, "")}, "the pattern .* matches in several ways"),
        (
            {"normalizer": _sequence([_replace({"String": "a"}, "aa")] * 40)},
            r"make a text 1\.1e\+12 times as long",
        ),
        ({"normalizer": _replace({"String": ""}, "a" * 99)}, "make a text 100 times as long"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 99}}, "a prefix of more than 64"),
        ({"normalizer": _charsmap("ä" * 99)}, "make a text 99 times as long"),
        ({"normalizer": _sequence([_charsmap("a" * 18)] * 2)}, "make a text 324 times as long"),
        ({"post_processor": _template(["A"] * 2)}, "a template of 2 texts and 0 tokens"),
        ({"post_processor": _template(["</s>"] * 65 + ["A"])}, "1 texts and 65 tokens"),
        (
            {"model": {"type": "WordPiece", "max_input_chars_per_word": 1001, **WORDPIECE}},
            r"words of more than 1000 characters \(max_input_chars_per_word\)",
        ),
    ],
)
def test_a_tokenizer_that_may_take_forever(
    folder: Folder, changes: dict[str, Any], expected: str
) -> None:
    path = folder() / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))
    with pytest.raises(ArtifactError, match=rf"tokenizer\.json: not a tokenizer: .*{expected}"):
        load_tokenizer(path, model_vocab=None)


def test_a_map_of_characters_is_taken(folder: Folder) -> None:
    path = folder() / "tokenizer.json"
    longest = _charsmap("\u0635\u0644\u0649 " * 4)  # of NFKC: U+FDFA becomes 18 characters
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": longest}))
    load_tokenizer(path, model_vocab=None)


def test_a_tokenizer_that_panics_or_fails() -> None:
    """Built in code here; from a file, such a pattern is refused before."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
    tokenizer = Tokenizer(backend, SpecialTokens(), source="some.json")
    with pytest.raises(ArtifactError, match=r"some\.json: the tokenizer failed: "):
        tokenizer.encode("b")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(EVIL), "isolated")
    with pytest.raises(ArtifactError, match=r"some\.json: the tokenizer failed: .*retry-limit"):
        tokenizer.encode("a" * 60 + "b")
