"""Ranks that share a copy stop before the same step, however they take turns."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lite_runner.config.ranks import Ranks
from lite_runner.distributed.stopping import Board, CommonStop

STEPS = 30  # of a generation that nobody stops


class Rank:
    """A rank that generates: it begins a step, and ends it once its copy's others have begun it."""

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self.copy = ranks.data_index
        self.stop = CommonStop(Board(path), ranks)
        self.begun = 0  # steps
        self.waits = False  # within a step, for the others
        self.over = False

    def move(self, peers: list[Rank]) -> None:
        if self.waits:
            self.waits = any(peer.begun < self.begun for peer in peers)
        elif self.begun == STEPS or self.stop.here():
            self.over = True
        else:
            self.begun += 1
            self.waits = True


@pytest.mark.parametrize("seed", range(200))
def test_the_ranks_of_a_copy_stop_before_the_same_step(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    data, tensor = choose.choice([(1, 2), (2, 1), (2, 2), (1, 4)])
    path = tmp_path / "board"
    board = Board.create(path, data * tensor)
    ranks = [Rank(path, Ranks(rank, data, tensor)) for rank in range(data * tensor)]
    copies = [[rank for rank in ranks if rank.copy == copy] for copy in range(data)]
    asked_after = choose.randrange(1, 2 * STEPS * len(ranks))
    begun_when_asked = [0] * data
    for turn in range(100 * STEPS * len(ranks)):
        if turn == asked_after:
            begun_when_asked = [max(rank.begun for rank in copy) for copy in copies]
            assert board.take() is board.began
        moving = [rank for rank in ranks if not rank.over]
        if not moving:
            break
        rank = choose.choice(moving)
        rank.move(copies[rank.copy])
    assert all(rank.over for rank in ranks)
    for copy, before in zip(copies, begun_when_asked, strict=True):
        (begun,) = {rank.begun for rank in copy}
        if board.asked and turn > asked_after:
            assert before <= begun <= min(STEPS, before + 1 + (tensor > 1))
        else:
            assert begun == STEPS


def test_ctrl_c_is_for_the_ranks_once_and_only_while_they_generate(tmp_path: Path) -> None:
    path = tmp_path / "board"
    launcher = Board.create(path, 2)
    rank = Board(path)
    assert not launcher.take() and not launcher.asked
    CommonStop(rank, Ranks(0, 2, 1)).here()
    assert launcher.take() and rank.asked
    assert not launcher.take()
    assert rank.take()  # Ctrl-C may come to every process of a job


def test_a_new_board_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "board"
    old = Board.create(path, 4)
    old.begin()
    new = Board.create(path, 4)
    assert old.began and not new.began and not new.asked
    assert [new.stop_of(copy) for copy in range(4)] == [0] * 4


def test_without_a_board_nobody_stops() -> None:
    stop = CommonStop(None, Ranks(1, 1, 2))
    assert not any(stop.here() for _ in range(3))
