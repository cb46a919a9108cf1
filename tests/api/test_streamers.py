"""Streamers: text as tokens come, for one sequence after another."""

from __future__ import annotations

import queue

import numpy as np
import pytest

from lite_runner import TextIteratorStreamer, TextStreamer
from lite_runner.api.streamers import SequentialStream
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ConfigError
from lite_runner.text.tokenizer import byte_tokenizer

TOKENIZER = PreTrainedTokenizer(byte_tokenizer())


def test_text_is_written_as_characters_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(TOKENIZER)
    streamer.put(np.array([[256, 97, 98]]))
    assert capsys.readouterr().out == "ab"
    first, second = "é".encode()
    streamer.put(first)
    assert capsys.readouterr().out == ""
    streamer.put([second])
    assert capsys.readouterr().out == "é"
    streamer.put([first])
    streamer.end()
    assert capsys.readouterr().out == "\ufffd\n"
    streamer.put([99])  # a new sequence
    assert capsys.readouterr().out == "c"


def test_the_prompt_may_be_left_out_of_every_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=False)
    for _ in range(2):
        streamer.put([97])
        streamer.put([98])
        streamer.put([257])
        streamer.end()
    assert capsys.readouterr().out == "b</s>\n" * 2


def test_several_sequences_in_one_put_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(2, 1\)"):
        TextStreamer(TOKENIZER).put([[1], [2]])


def test_an_iterator_ends_with_each_sequence() -> None:
    streamer = TextIteratorStreamer(TOKENIZER, timeout=0.01)
    for text in (b"ab", b"c"):
        streamer.put(list(text))
        streamer.end()
    assert list(streamer) == ["ab"]
    assert list(streamer) == ["c"]
    with pytest.raises(queue.Empty):
        next(streamer)


def test_sequences_that_grow_together_come_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    turn = SequentialStream(TextStreamer(TOKENIZER), [[97], [98], [99]])
    turn.on_token(1, 49)
    turn.on_token(0, 48)
    turn.on_finish(1)
    assert capsys.readouterr().out == "a0"
    turn.on_finish(0)
    assert capsys.readouterr().out == "\nb1\nc"
    turn.close()
    assert capsys.readouterr().out == "\n"


def test_closing_after_the_last_sequence_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    turn = SequentialStream(TextStreamer(TOKENIZER), [[97]])
    turn.on_finish(0)
    turn.close()
    assert capsys.readouterr().out == "a\n"
