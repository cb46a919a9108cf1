"""Texts as they are printed, the reports of adapters, and merged results of ranks."""

from __future__ import annotations

import io
import itertools
import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lite_runner import progress
from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.config.prompt import Message, Request
from lite_runner.generation import Completion, Generation, GenerationTiming
from lite_runner.model.adapters import AdapterJob
from lite_runner.output import AdapterReport, AdapterUse, RowResult
from lite_runner.output.completions import (
    SPEED_INTERVAL_S,
    Format,
    Printer,
    RankResult,
    Speedometer,
    adapter_report,
    advice,
    merge,
)
from lite_runner.plan import Job
from lite_runner.text.tokenizer import byte_tokenizer


def row(adapter: str | None, prompt: int, generated: int) -> RowResult:
    return RowResult("p", "t", [1] * generated, prompt, generated, "length", adapter=adapter)


def test_each_adapter_and_the_base_have_their_own() -> None:
    """Prompts are counted once, however many sequences each has; an unused one is 0."""
    names = ["en", None, "en"]
    adapters = [SimpleNamespace(name="en", pairs=range(8)), SimpleNamespace(name="zh", pairs=[1])]
    job = Job(
        [Request("p")] * 3,
        [[1]] * 3,
        GenerationConfig(max_new_tokens=4),
        slots=2,
        length=9,
        adapters=AdapterJob(cast("Any", adapters), names),
    )
    rows = [row("en", 3, 4), row("en", 3, 2), row(None, 5, 1), row("en", 7, 8)]
    outcome = Generation([], adapter_s={"en": 1.5, None: 0.25})
    slots = SimpleNamespace(slots=2, nbytes=100, loads=3)
    used = {
        "base": AdapterUse(0, 1, 5, 1, 0.25),
        "en": AdapterUse(8, 2, 13, 14, 1.5),
        "zh": AdapterUse(1, 0, 0, 0, 0.0),
    }
    found = adapter_report(job, rows, outcome, cast("Any", slots))
    assert found == AdapterReport(2, 100, 3, used)
    assert adapter_report(job, rows, outcome, None) == AdapterReport(0, 0, 0, used)


def test_a_run_without_adapters_has_none() -> None:
    job = Job((), (), GenerationConfig(max_new_tokens=4), slots=1, length=9)
    assert adapter_report(job, (), Generation([]), None) is None


def share(number: int, **others: object) -> RankResult:
    """A copy whose figures are all different, in powers of two of seconds."""
    row = RowResult(f"p{number}", "text", [number], 3, 1, "length")
    timing = GenerationTiming(
        prefill_s=0.25 * number,
        decode_s=2.0 / number,
        time_to_first_token_s=0.125 * number,
        prefill_tokens=8 * number,
        decode_tokens=3,
    )
    figures = {"load_s": 4.0 / number, "compile_s": 1.0 * number, "prepare_s": 0.5 * number}
    return RankResult(rows=[row], generation=timing, peak_rss_mib=10.04, **figures | others)


def test_times_and_rates_of_a_share() -> None:
    """Compiling is no part of a rate, and of the first token only what it waited for."""
    timing = share(2).timing()
    assert (timing.load_s, timing.compile_s) == (2.0, 2.0)
    assert (timing.prefill_s, timing.decode_s) == (0.5, 1.0)
    assert (timing.prefill_tok_s, timing.decode_tok_s) == (32.0, 3.0)
    assert timing.time_to_first_token_s == 2.0 + 1.0 + 0.25
    assert RankResult(load_s=1.0).timing().time_to_first_token_s is None


def test_a_share_as_bytes() -> None:
    report = AdapterReport(2, 100, 1, {"zh": AdapterUse(4, 1, 2, 3, 0.5)})
    for one in (share(1), share(2, adapters=report, interrupted=True)):
        assert RankResult.from_bytes(one.to_bytes()) == one


@pytest.mark.parametrize("ranks_per_replica", [1, 2])
def test_copies_work_at_the_same_time(ranks_per_replica: int) -> None:
    """Rows one after the other; the longest of each time, the first copy's first token, and the
    memory of every rank."""
    copies = [share(1), share(2, interrupted=True)]
    every = [one for one in copies for _ in range(ranks_per_replica)]
    found = merge(every, ranks_per_replica)
    assert [row.prompt for row in found.rows] == ["p1", "p2"]
    assert found.generation == GenerationTiming(
        prefill_s=0.5, decode_s=2.0, time_to_first_token_s=0.125, prefill_tokens=24, decode_tokens=6
    )
    assert (found.load_s, found.compile_s, found.prepare_s) == (4.0, 2.0, 1.0)
    assert found.peak_rss_mib == round(20.08 * ranks_per_replica, 1)
    assert found.interrupted and not merge(every[:1], 1).interrupted


def test_the_reports_of_all_copies_are_one() -> None:
    def share(loads: int, **used: AdapterUse) -> RankResult:
        return RankResult(adapters=AdapterReport(2, 100, loads, used))

    first = share(3, base=AdapterUse(0, 1, 5, 7, 0.5), en=AdapterUse(8, 2, 10, 12, 1.0))
    second = share(1, en=AdapterUse(8, 1, 4, 6, 0.25), zh=AdapterUse(4, 1, 2, 3, 0.5))
    sent = [RankResult.from_bytes(one.to_bytes()) for one in (first, first, second, second)]
    assert merge(sent, 2).adapters == AdapterReport(
        places=2,
        pool_bytes=400,
        loads=4,
        used={
            "base": AdapterUse(0, 1, 5, 7, 0.5),
            "en": AdapterUse(8, 3, 14, 18, 1.25),
            "zh": AdapterUse(4, 1, 2, 3, 0.5),
        },
    )
    assert merge([RankResult(), second], 1).adapters == second.adapters
    assert merge([RankResult(), RankResult()], 1).adapters is None


def test_shares_are_put_together_in_the_order_of_the_copies() -> None:
    def one(name: str, seconds: float) -> RankResult:
        found = [{"token": 1, "logprob": -0.5, "top": [[1, -0.5]]}]
        row = RowResult(
            name, "text", (1, 2), 3, 2, "stop", logprobs=found, prompt_logprobs=[None, *found]
        )
        timing = GenerationTiming(seconds, 2 * seconds, seconds, 30, 20)
        return RankResult(rows=[row], generation=timing, load_s=seconds, peak_rss_mib=10.0)

    parts = [one("a", 1.0), one("a", 1.0), one("b", 4.0), RankResult(peak_rss_mib=5.0)]
    whole = merge([RankResult.from_bytes(part.to_bytes()) for part in parts], 2)
    assert [row.prompt for row in whole.rows] == ["a", "b"]
    assert [row.prompt_logprobs[1] for row in whole.rows] == whole.rows[0].logprobs * 2
    timing = whole.timing()
    assert (timing.prefill_tok_s, timing.decode_tok_s) == (60 / 4.0, 40 / 8.0)
    assert (timing.load_s, timing.time_to_first_token_s) == (4.0, 5.0)
    assert whole.peak_rss_mib == 35.0


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
    completions = [completion(i, text) for i, text in enumerate(texts)]
    for one in reversed(completions):
        for token in one.token_ids:
            printer.on_token(one.prompt_index, 0, token)
        printer.on_finish(one)
    rows = printer.rows(completions)
    assert [row.text for row in rows] == list(texts)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_elsewhere_than_on_a_terminal_texts_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
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
    completions = [completion(i, text, reason) for i, (text, reason) in enumerate(texts)]
    for one in completions:
        for token in one.token_ids:
            printer.on_token(one.prompt_index, 0, token)
    return advice(printer.rows(completions), of, chat=False, tokenizer=CHATTY)


CHATTY = byte_tokenizer().with_special(chat_template="{{ messages }}")


def test_a_truncated_text_is_reported_once() -> None:
    assert rows_of(job(Request("a")), ("abcd", "length")) == [
        "the text was cut at max_new_tokens=4: a larger max_new_tokens= continues it"
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


def test_a_stream_is_written_at_most_twenty_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first piece at once, the last one in any case."""
    now, written = [100.0], list[tuple[float, str]]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "text", lambda text: text and written.append((now[0], text)))
    printer = Printer(
        byte_tokenizer(), job(Request("a")), of_all=1, stream=True, form="text", step=None
    )
    row_result = completion(0, "0123456789" * 3)
    for token in row_result.token_ids:
        printer.on_token(0, 0, token)
        now[0] += 0.01
    printer.on_finish(row_result)
    texts = [text for _, text in written]
    assert texts[0] == "0" and "".join(texts) == "0123456789" * 3 + "\n"
    times = [moment for moment, _ in written]
    pairs = itertools.pairwise(times[:-2])  # the last two are the rest, and the end of the line
    assert all(later - earlier > 0.045 for earlier, later in pairs)
    assert len(written) <= 9
