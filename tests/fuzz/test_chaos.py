"""A short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

from fuzz.chaos import chaos

FAULTS = {
    "stopped",
    "clock_moved",
    "short_of_disk",
    "short_of_memory",
    "adapters_swapped",
    "killed",
}


def test_every_answer_is_right_or_an_honest_error(tmp_path: Path) -> None:
    found = chaos(tmp_path, seed=1, seconds=0.6)
    assert found.findings == []
    # Every fault took place, with requests under way, and afterwards all were answered.
    assert found.done.keys() == FAULTS | {"undisturbed"}
    assert all(outcomes["right"] for outcomes in found.done.values()), found.done
    assert found.done["killed"]["cut off"] and found.done["adapters_swapped"]["swaps"]
