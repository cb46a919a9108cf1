"""Did-you-mean: the nearest of what exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NEAR_NAME = 0.75  # how alike two names are that may be one misspelt


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The entry of `known` most like `word`, whatever the case; None where none is near."""
    by_lower = {entry.lower(): entry for entry in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Like `nearest`, for dotted keys: a right name in a wrong section is found too.

    Names are compared first: a long section that two keys share does not make them alike.
    """
    sections: dict[str, list[str]] = {}
    for entry in known:
        if entry != key:
            sections.setdefault(entry.rpartition(".")[2], []).append(entry)
    name = key.rpartition(".")[2]
    near = name if name in sections else nearest(name, sections, cutoff=NEAR_NAME)
    return nearest(key, sections[near], cutoff=0.0) if near else None


def nearest_flag(word: str, names: Iterable[str]) -> str | None:
    """The one of `names` most like a flag as typed, written as a flag; None where none is near."""
    near = nearest(word.lstrip("-").replace("-", "_"), names, cutoff=NEAR_NAME)
    return near and f"--{near}"


def did_you_mean(found: str | None) -> str:
    """The tail of a fault's sentence; empty where there is nothing to suggest."""
    return f"; did you mean {found}?" if found else ""
