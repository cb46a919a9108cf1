"""What copies of a model made, put merge."""

from __future__ import annotations

import pytest

from lite_runner.generation import GenerationTiming
from lite_runner.output.merge import RankResult, merge
from lite_runner.output.report import AdapterReport, AdapterUse, RowResult


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
