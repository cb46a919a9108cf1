"""benchmarks/prefix.py over a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_it_compares_with_the_cache_and_without(measured: Callable[..., str]) -> None:
    output = measured(
        *("prefix.py", "--prompts", "5"),
        *("--prefix", "40", "--own", "3", "--slots", "2", "--rounds", "1"),
    )
    assert "5 prompts of one prefix of 40 tokens and 3 of their own" in output
    assert "First tokens: equal." in output
    cached = re.search(r"\((\d+) tokens were cached\)", output)
    assert cached and int(cached[1]) == 4 * 40
