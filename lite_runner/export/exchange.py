"""What the ranks of an export tell each other; a single one tells itself."""

from __future__ import annotations

from lite_runner.config.ranks import Ranks


def gather(ranks: Ranks, text: str) -> list[str]:
    """The text of each rank, on every rank; returns when all are here."""
    if ranks.size == 1:
        return [text]
    from lite_runner.backends import collectives

    return [said.decode() for said in collectives.gather(text.encode())]


def broadcast(ranks: Ranks, text: str) -> str:
    """The text of the first rank, on every rank; returns when all are here."""
    return gather(ranks, text)[0]


def barrier(ranks: Ranks) -> None:
    """Returns when all ranks are here."""
    gather(ranks, "")
