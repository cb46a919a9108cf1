"""Ranks that share a model: their NUMA nodes. What they exchange: tests/backends/native/test_ranks;
races: test_sanitizers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.errors import EnvironmentFault
from lite_runner.native.peers import bind_to_node, meet_peers
from lite_runner.native.structs import Share


def test_ranks_are_bound_to_numa_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(1, 24)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    lists = {"node0": "0-3,8-9\n", "node1": "4-7\n", "node2": "\n", "node10": "10-11\n"}
    for name, cpus in lists.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus)
        bind_to_node(0, 1, tmp_path)
    # One node alone says nothing; node2 has memory alone.
    assert bound == [{1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 2, 3, 4, 5, 6, 7, 8, 9}, set(range(1, 12))]
    bound.clear()
    for count in (2, 3, 6):
        for index in range(count):
            bind_to_node(index, count, tmp_path)
    first, second, third = {1, 2, 3, 8, 9}, {4, 5, 6, 7}, {10, 11}
    assert bound[:2] == [first, second | third]
    assert bound[2:5] == [first, second, third]
    assert bound[5:] == [first, first, second, second, third, third]


def test_ranks_of_several_machines_use_a_collective() -> None:
    """There the first rank's path leads to another file, or to none."""
    with Path(__file__).open("rb") as other:
        for path in (f"/proc/{os.getpid()}/fd/{other.fileno()}", "/proc/0/fd/9"):
            answers = []

            def gather(text: str, path: str = path, answers: list[str] = answers) -> list[str]:
                answers.append(text)
                return ["/x 00", f"{path} 00", ""] if len(answers) == 1 else ["", "", text]

            def stack(own: NDArray[np.float32]) -> NDArray[np.float32]:
                return np.stack([own, own])

            meet_peers(Share(1, 2), gather, 1, lambda: stack).close()
            assert answers[1] == "elsewhere"


def test_a_rank_that_cannot_map_the_memory_ends_all() -> None:
    replies = iter([["/proc/0/fd/9 00", ""], ["", "cannot map"]])
    with pytest.raises(EnvironmentFault, match="do not share memory: cannot map") as caught:
        meet_peers(Share(1, 2), lambda _: next(replies), 0, pytest.fail)
    assert "backend=ms" in caught.value.hint
