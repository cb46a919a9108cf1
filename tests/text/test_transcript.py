from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.text.tokenizer import byte_tokenizer
from lite_runner.text.transcript import Transcript

TOKENIZER = byte_tokenizer()


def feed(text: str, stop: list[str]) -> tuple[str, Transcript]:
    """What was shown on the way, byte by byte, and the transcript."""
    transcript = Transcript(TOKENIZER, stop)
    shown = "".join(transcript.put(token) for token in text.encode())
    return shown + transcript.finish(), transcript


@pytest.mark.parametrize(
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
    shown, transcript = feed(text, stop)
    assert shown == transcript.text == expected
    assert transcript.stopped == (expected != text)


def test_a_possible_start_of_a_stop_text_is_held_back() -> None:
    transcript = Transcript(TOKENIZER, ["STOP"])
    assert [transcript.put(ord(letter)) for letter in "aSTx"] == ["a", "", "", "STx"]


def test_nothing_follows_a_stop() -> None:
    transcript = Transcript(TOKENIZER, ["."])
    assert [transcript.put(ord(letter)) for letter in "a.b"] == ["a", "", ""]
    assert transcript.finish() == ""


@given(st.text(alphabet="abc好", max_size=30), st.lists(st.text("abc好", min_size=1, max_size=4)))
def test_equals_cutting_the_whole_text(text: str, stop: list[str]) -> None:
    places = [text.find(each) for each in stop if each in text]
    # Of stop texts that are complete at different times, the one that is complete first counts.
    ends = [text.find(each) + len(each) for each in stop if each in text]
    shown, transcript = feed(text, stop)
    assert shown == transcript.text
    if not places:
        assert shown == text
    else:
        assert transcript.stopped and text.startswith(shown)
        assert len(shown) <= min(ends)
        assert not any(each in shown for each in stop)
