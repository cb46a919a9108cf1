"""Did-you-mean: the nearest of what exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The entry of `known` most like `word`, whatever the case; None where none is near."""
    by_lower = {entry.lower(): entry for entry in known}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Like `nearest`, for dotted keys: a right name in a wrong section is found too."""
    keys = list(known)
    name = key.rpartition(".")[2]
    same_name = [entry for entry in keys if entry.rpartition(".")[2] == name]
    if same_name:
        return nearest(key, same_name, cutoff=0.0)
    whole = nearest(key, keys, cutoff=0.75)
    if whole:
        return whole
    by_name = {entry.rpartition(".")[2]: entry for entry in reversed(keys)}
    near_name = nearest(name, by_name, cutoff=0.7)
    return by_name[near_name] if near_name else None


def did_you_mean(found: str | None) -> str:
    """The tail of a fault's sentence; empty where there is nothing to suggest."""
    return f"; did you mean {found}?" if found else ""
