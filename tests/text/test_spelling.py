from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from lite_runner.text import StreamDecoder, Tokenizer, byte_tokenizer
from lite_runner.text.sentencepiece import build_tokenizer, read_model
from lite_runner.text.spelling import StopChecker
from lite_runner.text.tokenizer import SpecialTokens
from tests.each import each

KINDS = ["bytes", "byte-level", "bpe", "unigram", "no prefix", "normalized", "metaspace"]


@pytest.fixture(scope="session")
def tokenizer_of(
    byte_level: tokenizers.Tokenizer, sentencepiece_model: Callable[..., Path]
) -> Callable[[str], Tokenizer]:
    by_name: dict[str, Tokenizer] = {"bytes": byte_tokenizer()}
    by_name["byte-level"] = Tokenizer(byte_level, SpecialTokens(), source="test")
    options = {
        "bpe": {},
        "unigram": {"model_type": "unigram"},
        "no prefix": {"add_dummy_prefix": False},
        "normalized": {"normalization_rule_name": "nmt_nfkc", "byte_fallback": False},
    }
    for name, option in options.items():
        backend = build_tokenizer(read_model(sentencepiece_model(**option)), source="test")
        by_name[name] = Tokenizer(backend, SpecialTokens(), source="test")
    # A decoder that knows no bytes: decoded by the library.
    backend = build_tokenizer(read_model(sentencepiece_model()), source="test")
    backend.decoder = decoders.Metaspace()
    by_name["metaspace"] = Tokenizer(backend, SpecialTokens(), source="test")
    return by_name.__getitem__


def pieces(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    return [decoder.put(id) for id in ids] + [decoder.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 480), max_size=40), skip=st.booleans())
def test_pieces_join_to_the_whole(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, ids: list[int], skip: bool
) -> None:
    """Random ids: invalid UTF-8, special tokens and ids without a token among them."""
    tokenizer = tokenizer_of(kind)
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def test_a_space_behind_other_text_stays(sentencepiece_model: Callable[..., Path]) -> None:
    backend = build_tokenizer(read_model(sentencepiece_model()), source="test")
    tokenizer = Tokenizer(backend, SpecialTokens(), source="test")
    ids = tokenizer.encode("world")
    for continues, text in ((False, "world"), (True, " world")):
        decoder = StreamDecoder(tokenizer, continues=continues)
        assert "".join([decoder.put(id) for id in ids]) + decoder.finish() == text


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_early_and_never_half(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, texts: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    for text in texts:
        ids = tokenizer.encode(text)
        given = pieces(tokenizer, ids)
        assert "".join(given) == tokenizer.decode(ids)
        assert all("\ufffd" not in piece for piece in given)
        if text.isascii():
            # ASCII needs no second token to be certain
            assert given[-1] == ""


def test_a_character_appears_with_its_last_byte() -> None:
    ids = list("é你😀!".encode())
    assert pieces(byte_tokenizer(), ids) == ["", "é", "", "", "你", "", "", "", "😀", "!", ""]


def test_a_character_never_completed() -> None:
    assert pieces(byte_tokenizer(), [0xF0, 0x9F]) == ["", "", "\ufffd"]
    assert pieces(byte_tokenizer(), [0xF0, 0x41]) == ["", "\ufffdA", ""]


def test_invalid_bytes_spoil_only_themselves(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("bpe")
    ids = [tokenizer._backend.token_to_id(f"<0x{byte:02X}>") for byte in b"a\xe4\xbd\xa0\xff\n"]
    assert tokenizer.decode(ids) == "a你\ufffd\n"
    assert pieces(tokenizer, ids) == ["a", "", "", "你", "\ufffd", "\n", ""]


def test_leading_spaces_of_sentencepiece(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    tokenizer = tokenizer_of("bpe")
    ids = tokenizer.encode("Hello  world  x")
    assert "".join(pieces(tokenizer, ids)) == "Hello  world  x"
    # Special tokens in between neither cost a space nor add one.
    eos = tokenizer._backend.token_to_id("</s>")
    spread = [part for id in ids for part in (eos, id)]
    assert "".join(pieces(tokenizer, spread)) == "Hello  world  x"


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_stays_small(tokenizer_of: Callable[[str], Tokenizer], kind: str) -> None:
    """Decoding again and again what was decoded would make long texts slow."""
    tokenizer = tokenizer_of(kind)
    decoder, longest = StreamDecoder(tokenizer), 0
    for id in tokenizer.encode("the capital of France 你好 " * 100):
        decoder.put(id)
        longest = max(longest, len(decoder._context) + len(decoder._pending))
    assert longest <= 30


@pytest.mark.parametrize(
    "stop, text, stopped, given",
    [
        ((), "abc", False, ["a", "b", "c", ""]),
        (("b",), "abc", True, ["a", "", "", ""]),
        (("bc",), "abcd", True, ["a", "", "", "", ""]),
        (("bc",), "abab", False, ["a", "", "ba", "", "b"]),
        (("aab",), "aaab", True, ["", "", "a", "", ""]),
        (("x", "bcd"), "abcx", True, ["a", "", "", "bc", ""]),
        (("\n\n",), "a\nb\n\nc", True, ["a", "", "\nb", "", "", "", ""]),
        (("a",), "abc", True, ["", "", "", ""]),
    ],
)
def test_stop_texts(stop: tuple[str, ...], text: str, stopped: bool, given: list[str]) -> None:
    checker = StopChecker(byte_tokenizer(), stop)
    out = [checker.put(byte) for byte in text.encode()] + [checker.finish()]
    assert out == given
    assert checker.text == "".join(given)
    assert checker.stopped == stopped


@given(st.text("ab你", max_size=30), st.lists(st.text("ab你", min_size=1, max_size=4), max_size=3))
def test_stop_texts_never_show(text: str, stop: list[str]) -> None:
    checker = StopChecker(byte_tokenizer(), stop)
    shown = ""
    for byte in text.encode():
        shown += checker.put(byte)
        assert not any(s in shown for s in stop)
    shown += checker.finish()
    assert text.startswith(shown) and checker.text == shown
    assert checker.stopped == any(s in text for s in stop)
    if not checker.stopped:
        assert shown == text


TOKENIZER = byte_tokenizer()


def feed(text: str, stop: list[str]) -> tuple[str, StopChecker]:
    """The text shown on the way, byte by byte, and the checker."""
    checker = StopChecker(TOKENIZER, stop)
    shown = "".join(checker.put(token) for token in text.encode())
    return shown + checker.finish(), checker


@each(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("aab", ["ab"], "a"),
        ("abc", ["bx", "c"], "ab"),
        ("北京。上海", ["。"], "北京"),
        ("ends with a start of it EN", ["END"], "ends with a start of it EN"),
        ("", ["x"], ""),
        ("xyz", ["xyz"], ""),
    ],
)
def test_text_ends_before_the_first_stop_text(text: str, stop: list[str], expected: str) -> None:
    shown, checker = feed(text, stop)
    assert shown == checker.text == expected
    assert checker.stopped == (expected != text)


def test_a_possible_start_of_a_stop_text_is_held_back() -> None:
    checker = StopChecker(TOKENIZER, ["STOP"])
    assert [checker.put(ord(letter)) for letter in "aSTx"] == ["a", "", "", "STx"]


def test_nothing_follows_a_stop() -> None:
    checker = StopChecker(TOKENIZER, ["."])
    assert [checker.put(ord(letter)) for letter in "a.b"] == ["a", "", ""]
    assert checker.finish() == ""


@given(st.text(alphabet="abc好", max_size=30), st.lists(st.text("abc好", min_size=1, max_size=4)))
def test_equals_cutting_the_whole_text(text: str, stop: list[str]) -> None:
    places = [text.find(each) for each in stop if each in text]
    # Of stop texts that are complete at different times, the one that is complete first counts.
    ends = [text.find(each) + len(each) for each in stop if each in text]
    shown, checker = feed(text, stop)
    assert shown == checker.text
    if not places:
        assert shown == text
    else:
        assert checker.stopped and text.startswith(shown)
        assert len(shown) <= min(ends)
        assert not any(each in shown for each in stop)
