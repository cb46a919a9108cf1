"""benchmarks/prefill.py over a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable


def test_products_and_attention_have_their_shares(measured: Callable[..., str]) -> None:
    output = measured("prefill.py", "--prompts", "40", "60", "--rounds", "1")
    assert re.search(r"products of 512 rows make \d+\.\d GMAC/s, \d+% of the peak", output)
    rows = re.findall(r"\| (\d+) \| (\d+) \| (-?\d+)% \|", output)
    assert [tokens for tokens, *_ in rows] == ["40", "60"]
    assert all(float(rate) > 0 and float(share) < 100 for _, rate, share in rows)
