"""Tensor and data parallel networks under real msrun, against transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lite_runner.config.sections import Cluster
from lite_runner.distributed.job import Limits, run_ranks

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "fixtures" / "reference"
TOLERANCE = 1e-4  # as for one rank: a wrong piece or a bias that is added twice is off by 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of four ranks; one launch for all tests."""
    path = tmp_path_factory.mktemp("ranks")
    program = [str(HERE / "parallel_driver.py"), str(path)]
    run_ranks(program, Cluster(4, 4), path, Limits(rendezvous=120, total=300))
    return path


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("llama", [0, 1, 2, 3]),  # two key/value heads for four ranks; a head of its own
        ("bloom", [2, 3]),  # the vocabulary is whole on every rank
        ("gpt2_inner", [2, 3]),  # learned positions, without a cache
        ("qwen3", [0, 1]),  # the gains of its q and k norms are whole on every rank
        ("gemma2", [0, 1]),  # norms of what the ranks have added up
        ("gpt_neox", [0, 1]),  # attention and feed-forward are added up once
        ("chatglm_6b", [2, 3]),  # a prefix, and residuals that start from normed values
        ("qwen3_moe", [0, 1]),
        ("mixtral", [0, 1]),  # its experts are cut along their width
        ("llama_biases", [2, 3]),  # of layers that are cut along their inputs, added once
    ],
)
def test_logits_equal_transformers_and_are_the_same_on_every_rank(
    folder: Path, case: str, ranks: list[int]
) -> None:
    expected = np.load(REFERENCE / case / "expected.npz")["logits"]
    found = [np.load(folder / f"rank_{rank}.npz")[case] for rank in ranks]
    for logits in found:
        assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
        assert logits.tobytes() == found[0].tobytes()


def test_payloads_of_any_length_are_gathered_by_rank(folder: Path) -> None:
    for rank in range(4):
        gathered = json.loads((folder / f"gathered_{rank}.json").read_text())
        assert gathered == ["", "xxx", "xxxxxx", "xxxxxxxxx"]
