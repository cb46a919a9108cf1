"""What stands on standard output for each kind of reader, and what the user is told besides."""

from __future__ import annotations

import io
import itertools
import json
import time

import pytest

from lite_runner import progress
from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.config.prompt import Message, Request
from lite_runner.generation import Completion
from lite_runner.output.printer import SPEED_INTERVAL_S, Format, Printer, Speedometer, advice
from lite_runner.plan.plan import Job
from lite_runner.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
REQUESTS = (
    Request("first", id="q1"),
    Request(messages=(Message("user", "ask\nmore " + "x" * 99),)),
)


def job(*requests: Request, **options: object) -> Job:
    generation = GenerationConfig(max_new_tokens=4, **options)
    return Job(requests, [[1]] * len(requests), generation, slots=2, length=9)


def completion(prompt: int, text: str, reason: FinishReason = "stop") -> Completion:
    return Completion(prompt, 0, list(text.encode()), reason)


def play(of: Job, *texts: str, form: Format = "text", of_all: int = 0) -> None:
    """All the tokens, the last prompt's completion being the first to end."""
    several = of_all or len(texts)
    printer = Printer(TOKENIZER, of, of_all=several, stream=True, form=form, step=None)
    made = [completion(i, text) for i, text in enumerate(texts)]
    for one in reversed(made):
        for token in one.token_ids:
            printer.on_token(one.prompt_index, 0, token)
        printer.on_finish(one)
    rows = printer.rows(made)
    assert [row.text for row in rows] == list(texts)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_texts_stand_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    play(job(*REQUESTS), "one", "two")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_on_a_terminal_a_line_names_each_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    play(job(*REQUESTS), "one", "two")
    lines = screen.getvalue().split("\n")
    assert lines[:4] == ["[1/2] q1: first", "one", "", "[2/2] ask more " + "x" * 60 + "..."]
    screen.truncate(0)
    screen.seek(0)
    play(job(REQUESTS[0]), "alone")
    assert screen.getvalue() == "alone\n"


def test_json_lines_are_in_the_order_of_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    play(job(*REQUESTS), "é\n", "two", form="jsonl")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        "id": "q1",
        "prompt": "first",
        "text": "é\n",
        "finish_reason": "stop",
        "tokens": 3,
        "adapter": None,
    }
    assert second["id"] == 1 and second["prompt"] == REQUESTS[1].text
    play(job(REQUESTS[0]), "alone", form="jsonl")
    assert json.loads(capsys.readouterr().out)["text"] == "alone"


def rows_of(of: Job, *texts: tuple[str, FinishReason]) -> list[str]:
    printer = Printer(TOKENIZER, of, of_all=2, stream=False, form="text", step=None)
    made = [completion(i, text, reason) for i, (text, reason) in enumerate(texts)]
    for one in made:
        for token in one.token_ids:
            printer.on_token(one.prompt_index, 0, token)
    return advice(printer.rows(made), of, chat=False, tokenizer=CHATTY)


CHATTY = byte_tokenizer().with_special(chat_template="{{ messages }}")


def test_a_text_that_was_cut_is_told_once() -> None:
    assert rows_of(job(Request("a")), ("abcd", "length")) == [
        "the text was cut at max_new_tokens=4: a larger max_new_tokens= goes on"
    ]
    own = job(Request("a"), Request("b", max_new_tokens=2), Request("c"))
    (line,) = rows_of(own, ("abcd", "length"), ("ab", "length"), ("abc", "stop"))
    assert line.startswith("2 of 3 texts were cut at max_new_tokens=4, max_new_tokens=2:")
    (line,) = rows_of(job(Request("a")), ("abc", "length"))  # by the context
    assert "cut at 4 tokens, the prompt's 1 included" in line
    assert rows_of(job(Request("a")), ("abc", "stop")) == []


def test_a_chat_model_that_has_nothing_to_say_is_asked_another_way() -> None:
    (line,) = rows_of(job(Request("a")), ("\n", "stop"))
    assert "chat=true" in line
    assert rows_of(job(Request("a")), ("x", "stop")) == []


def test_the_speed_is_of_the_tokens_since_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now, shown = 50.0, list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(progress, "status", shown.append)
    speed = Speedometer()
    for _ in range(3):
        speed.count()
        now += SPEED_INTERVAL_S / 2
    rate = 2 / SPEED_INTERVAL_S
    assert shown == [f"generate: 3 tokens, {rate:.1f} tokens/s"]


def test_a_stream_is_written_at_most_twenty_times_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first piece at once, the last one in any case."""
    now, written = [100.0], list[tuple[float, str]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "text", lambda text: text and written.append((now[0], text)))
    printer = Printer(
        byte_tokenizer(), job(Request("a")), of_all=1, stream=True, form="text", step=None
    )
    made = completion(0, "0123456789" * 3)
    for token in made.token_ids:
        printer.on_token(0, 0, token)
        now[0] += 0.01
    printer.on_finish(made)
    texts = [text for _, text in written]
    assert texts[0] == "0" and "".join(texts) == "0123456789" * 3 + "\n"
    times = [moment for moment, _ in written]
    pairs = itertools.pairwise(times[:-2])  # the last two are the rest, and the end of the line
    assert all(later - earlier > 0.045 for earlier, later in pairs)
    assert len(written) <= 9
