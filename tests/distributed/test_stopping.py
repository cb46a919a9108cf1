"""Ranks that share a copy stop before the same step, however they take turns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lite_runner.config.sections import Ranks
from lite_runner.distributed.stopping import StopCondition, StopFlags

STEPS = 30  # of a generation that nobody stops


class Rank:
    """A rank that generates: it begins a step, and ends it once its copy's others have begun it."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.copy = ranks.data_index
        self.stop = StopCondition(StopFlags(path), ranks)
        self.begun = 0  # steps
        self.waits = False  # within a step, for the others
        self.over = False

    def move(self, peers: list[Rank]) -> None:
        if self.waits:
            self.waits = any(peer.begun < self.begun for peer in peers)
        elif self.begun == STEPS or self.stop.reached():
            self.over = True
        else:
            self.begun += 1
            self.waits = True


def test_the_ranks_of_a_copy_stop_before_the_same_step(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for seed in range(200):
        with subtests.test(seed=seed):
            choose = random.Random(seed)
            data, tensor = choose.choice([(1, 2), (2, 1), (2, 2), (1, 4)])
            path = tmp_path / "flags"
            flags = StopFlags.create(path, data * tensor)
            ranks = [Rank(path, Ranks(rank, data, tensor)) for rank in range(data * tensor)]
            copies = [[rank for rank in ranks if rank.copy == copy] for copy in range(data)]
            asked_after = choose.randrange(1, 2 * STEPS * len(ranks))
            begun_when_asked = [0] * data
            for turn in range(100 * STEPS * len(ranks)):
                if turn == asked_after:
                    begun_when_asked = [max(rank.begun for rank in copy) for copy in copies]
                    assert flags.request_stop() is flags.generating
                moving = [rank for rank in ranks if not rank.over]
                if not moving:
                    break
                rank = choose.choice(moving)
                rank.move(copies[rank.copy])
            assert all(rank.over for rank in ranks)
            for copy, before in zip(copies, begun_when_asked, strict=True):
                (begun,) = {rank.begun for rank in copy}
                if flags.stop_requested and turn > asked_after:
                    assert before <= begun <= min(STEPS, before + 1 + (tensor > 1))
                else:
                    assert begun == STEPS


def test_ctrl_c_reaches_the_ranks_once_and_only_during_generation(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    launcher = StopFlags.create(path, 2)
    rank = StopFlags(path)
    assert not launcher.request_stop() and not launcher.stop_requested
    StopCondition(rank, Ranks(0, 2, 1)).reached()
    assert launcher.request_stop() and rank.stop_requested
    assert not launcher.request_stop()
    assert rank.request_stop()  # Ctrl-C may come to every process of a job


def test_new_flags_are_not_set(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    old = StopFlags.create(path, 4)
    old.set_generating()
    new = StopFlags.create(path, 4)
    assert old.generating and not new.generating and not new.stop_requested
    assert [new.stop_step(copy) for copy in range(4)] == [0] * 4


def test_without_flags_nobody_stops() -> None:
    stop = StopCondition(None, Ranks(1, 1, 2))
    assert not any(stop.reached() for _ in range(3))
