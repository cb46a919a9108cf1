"""How often a regex repeats its parts."""

from __future__ import annotations

import re

MOST_REPEATS = 10_000  # nested repeats, multiplied: an automaton has as many copies of the part
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(|\)|\{(\d+)(,?)(\d*)\}|[^\\]", re.DOTALL)


def repeats(pattern: str) -> int:
    """The largest product of the counts of repeats that are nested in one another."""
    open: list[int] = []  # the largest product inside each open group, so far
    most, before = 1, 1  # so far in this group; of the part just read
    for found in _PART.finditer(pattern):
        part = found[0]
        if part == "(":
            open.append(most)
            most = before = 1
        elif part == ")" and open:
            before, most = most, max(open.pop(), most)
        elif found[1] is not None:
            before *= int((found[3] or found[1])[:9])
            most = max(most, before)
        elif part not in "*+?":
            before = 1
    return most
