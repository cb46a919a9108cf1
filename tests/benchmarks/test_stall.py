"""benchmarks/stall.py over a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_it_measures_the_gaps_around_a_long_prompt(measured: Callable[..., str]) -> None:
    output = measured(
        *("stall.py", "--requests", "2"),
        *("--prompt-tokens", "24", "--token-budget", "8", "--steps", "3", "--rounds", "2"),
    )
    assert "2 requests are answered, a prompt of 24 tokens arrives" in output
    rows = re.findall(r"\| (before it arrives|while it is read) \| (.+) \| (.+) \|", output)
    assert [name for name, *_ in rows] == ["before it arrives", "while it is read"]
    assert all(0 < float(median) <= float(longest) for _, median, longest in rows)
    # Of a step's 8 tokens 2 are of the others.
    assert re.search(r"first token comes after \d+\.\d+ s, in 4 steps", output)
