"""What a run says of each adapter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from lite_runner.config.generation import GenerationConfig
from lite_runner.config.prompt import Request
from lite_runner.generation import Generation, GenerationTiming
from lite_runner.model.adapters import AdapterJob
from lite_runner.output.completions import RankResult, adapter_report, merge
from lite_runner.output.report import AdapterReport, AdapterUse, RowResult
from lite_runner.plan.plan import Job


def row(adapter: str | None, prompt: int, made: int) -> RowResult:
    return RowResult("p", "t", [1] * made, prompt, made, "length", adapter=adapter)


def test_each_adapter_and_the_base_have_their_own() -> None:
    """Prompts are counted once, however many sequences each has; one that nobody asks for is 0."""
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
        prefill_s=0.5,
        decode_s=2.0,
        time_to_first_token_s=0.125,
        prefill_tokens=24,
        decode_tokens=6,
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
