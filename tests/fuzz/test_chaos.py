"""A short form of `make chaos`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fuzz.chaos import Chaos, chaos

FAULTS = {"stopped", "short_of_disk", "short_of_memory", "adapters_swapped", "undisturbed"}


def test_every_answer_is_right_or_an_honest_error(tmp_path: Path) -> None:
    found = chaos(tmp_path, seed=1, seconds=0.6)
    check(found, {"clock_moved", "killed"})
    assert found.done["killed"]["cut off"]
    assert found.done["short_of_memory"]["out of memory"]


def test_every_answer_of_replicas_on_ray_is_too(ray_python: Path) -> None:
    # Ray's sockets are below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
        found = chaos(Path(folder), seed=1, seconds=0.6, ray=ray_python)
    check(found, {"replica_killed"})
    assert found.done["replica_killed"]["replaced"]


def check(found: Chaos, more: set[str]) -> None:
    """Every fault took place, with requests under way, and afterwards all were answered."""
    assert found.findings == []
    assert found.done.keys() == FAULTS | more
    assert all(outcomes["right"] for outcomes in found.done.values()), found.done
    assert found.done["adapters_swapped"]["swaps"]
