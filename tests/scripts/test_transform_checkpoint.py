"""scripts/transform_checkpoint.py, with MindFormers' flags and no model named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.sharding.partition import Layout, Strategy
from lite_runner.weights.sharding.strategy import write_strategy
from tests.scripts.running import Done, run_program, run_script

SCRIPT = "transform_checkpoint.py"


def transform(folder: Path, *flags: str) -> Done:
    return run_script(folder, SCRIPT, *flags)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """whole.ckpt of two tensors, and strategies for two and four ranks."""
    generator = np.random.default_rng(0)
    tensors = {}
    for name, shape in (("w", (8, 12)), ("norm", (8,))):
        values = generator.standard_normal(shape).astype(np.float32)
        tensors[name] = LazyTensor(shape, "F32", lambda values=values: values)
    write_ckpt(tmp_path / "whole.ckpt", tensors)
    for ranks in (2, 4):
        layouts = {"w": Layout((1, ranks), ((), (0,))), "norm": Layout((1, ranks), ((),))}
        write_strategy(tmp_path / f"s{ranks}/ckpt_strategy_rank_0.ckpt", Strategy(layouts))
    return tmp_path


def test_cut_cut_anew_and_merge(folder: Path) -> None:
    cut = ["--src_checkpoint=whole.ckpt", "--dst_checkpoint=two", "--dst_strategy=s2"]
    done = run_program(folder, SCRIPT, *cut, "--prefix=llama_", "--world_size=2")
    assert done.returncode == 0, done.stderr
    values = open_ckpt(folder / "whole.ckpt")["w"].read()
    second = open_ckpt(folder / "two/rank_1/llama_1.ckpt")["w"].read()
    assert np.array_equal(second, values[:, 6:])
    for rank in range(4):
        flags = ["--src_checkpoint", "two", "--src_strategy", "s2", "--dst_checkpoint_dir", "four"]
        flags += ["--dst_strategy", "s4", "--transform_by_rank", "True", "--rank_id", str(rank)]
        assert transform(folder, *flags).returncode == 0
    flags = ["--src_checkpoint=four", "--src_strategy=s4", "--dst_checkpoint_dir=one"]
    assert transform(folder, *flags, "--transform_process_num=2").returncode == 0
    merged = folder / "one/rank_0/checkpoint_0.ckpt"
    assert merged.read_bytes() == (folder / "whole.ckpt").read_bytes()


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (["--src_checkpoint=gone", "--dst_strategy=s2"], 4, "gone: neither a file nor a folder"),
        (["--src_checkpoint=whole.ckpt", "--dst_strategy=gone"], 4, "no such strategy file"),
        (["--src_checkpoint=whole.ckpt", "--dst_strategy=whole.ckpt"], 4, "not a strategy file"),
        (["--src_checkpoint=whole.ckpt", "--dst_strategy=s2", "--world_size=3"], 2, "is of 2"),
        (
            ["--src_checkpoint=whole.ckpt", "--transform_by_rank=1", "--rank_id=1"],
            2,
            "expected 0 to",
        ),
        (["--src_checkpoint=whole.ckpt", "--prefix=../x"], 2, "expected the start of a file name"),
        (["--src_checkpoint=whole.ckpt", "--dst_checkpoint_dir=s2"], 2, "exists already"),
        (["--dst_strategy=s2"], 2, "--src_checkpoint"),
    ],
)
def test_bad_input(folder: Path, flags: list[str], code: int, expected: str) -> None:
    done = transform(folder, "--dst_checkpoint_dir=out", *flags)
    assert done.returncode == code and expected in done.stderr
    assert not (folder / "out").exists() and "Traceback" not in done.stderr


def test_a_set_without_its_strategy(folder: Path) -> None:
    cut = ["--src_checkpoint=whole.ckpt", "--dst_checkpoint_dir=two", "--dst_strategy=s2"]
    assert transform(folder, *cut).returncode == 0
    done = transform(folder, "--src_checkpoint=two", "--dst_checkpoint_dir=one")
    assert done.returncode == 4 and "nothing describes how its 2 ranks are sharded" in done.stderr


def test_the_strategies_of_all_stages_in_one(folder: Path) -> None:
    done = run_program(folder, "merge_strategies.py", "s2", "merged.ckpt")
    assert done.stdout.strip() == str(folder / "merged.ckpt")
    flags = ["--src_checkpoint=whole.ckpt", "--dst_checkpoint=two", "--dst_strategy=merged.ckpt"]
    assert transform(folder, *flags).returncode == 0
    assert open_ckpt(folder / "two/rank_1/checkpoint_1.ckpt")["w"].shape == (8, 6)
    failed = run_script(folder, "merge_strategies.py", "gone", "merged.ckpt")
    assert failed.returncode == 4 and failed.stderr.startswith("error: gone: ")
