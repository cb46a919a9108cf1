"""run_mode=shard from the command line; its files are tested in sharding/test_shards.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.config.sections import Ranks
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.sharding.partition import strategy_of
from lite_runner.weights.sharding.shards import whole_tensors
from lite_runner.weights.sharding.strategy import read_strategy
from tests.models import model_named
from tests.paths import ROOT
from tests.refusals import refused

SHARD = ["verbosity=0", "run_mode=shard"]
TINY = "model=tiny_llama"


def shard(*arguments: str) -> int:
    return main([*SHARD, *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_bloom"])
def test_cut_cut_anew_and_merge(name: str) -> None:
    model = f"model={name}"
    assert shard(model, "load_checkpoint=random", "shard_output=whole.ckpt") == 0
    cut = ["load_checkpoint=whole.ckpt", "parallel=tp2", "transform_process_num=1"]
    assert shard(model, *cut) == 0
    two = f"outputs/{name}_tp2_dp1"
    grid = ["use_parallel=true", "parallel_config.data_parallel=2"]
    grid += ["parallel_config.model_parallel=2", "shard_output=grid", "shard_format=safetensors"]
    assert shard(model, f"load_checkpoint={two}", *grid) == 0
    assert shard(model, "load_checkpoint=grid", "parallel=tp4", "shard_output=four") == 0
    # Without manifests, as other tools leave their sets, the strategy tells.
    for path in Path("four").glob("rank_*/manifest.json"):
        path.unlink()
    merge = ["src_strategy_path_or_dir=four/strategy", "shard_output=back.ckpt"]
    assert shard(model, "load_checkpoint=four", *merge) == 0
    assert Path("back.ckpt").read_bytes() == Path("whole.ckpt").read_bytes()
    result = json.loads(Path("outputs/latest/result.json").read_text())
    assert (result["run_mode"], result["world_size"], result["engine"]) == ("shard", 1, "none")
    assert result["peak_rss_mib"] > 0
    assert {path.name for path in Path("grid").glob("rank_3/*")} == {
        *("checkpoint_3.safetensors", "manifest.json")
    }


def test_a_hugging_face_folder_and_model_auto(write_tiny_llama: Callable[..., Path]) -> None:
    """Sizes come from config.json, then from the manifests; the tokenizer's files go along."""
    folder = write_tiny_llama("model")
    (folder / "tokenizer_config.json").write_text("{}")
    assert shard("model=auto", "load_checkpoint=model", "parallel=tp2", "shard_output=two") == 0
    assert Path("two/tokenizer_config.json").read_text() == "{}"
    assert shard("model=auto", "load_checkpoint=two", "shard_output=back.ckpt") == 0
    model = model_named("tiny_llama")
    found, expected = (whole_tensors(path, model) for path in (Path("back.ckpt"), folder))
    for name, tensor in expected.items():
        assert np.array_equal(found[name].read(), tensor.read()), name


def test_the_strategies_alone() -> None:
    assert shard(TINY, "parallel=tp4", "only_save_strategy=true") == 0  # nothing is downloaded
    folder = Path("outputs/tiny_llama_tp4_dp1_strategy")
    names = {f"ckpt_strategy_rank_{rank}.ckpt" for rank in range(4)}
    assert {path.name for path in folder.iterdir()} == names
    expected = strategy_of(model_named("tiny_llama"), Ranks(0, 1, 4), vocab_parallel=False)
    assert read_strategy(folder) == expected


@pytest.mark.parametrize("alone", ["only_save_strategy=true", "load_checkpoint=random"])
def test_existing_files_are_replaced_only_with_overwrite(alone: str) -> None:
    line = [*SHARD, TINY, "shard_output=set", "parallel=tp4"]
    assert main([*line, alone]) == 0
    line[-1] = "parallel=tp2"
    refused([*line, alone], 2)
    refused([*line, alone, "dry_run=true"], 2)
    assert main([*line, alone, "overwrite=true"]) == 0
    assert not list(Path("set").rglob("*rank_3*")) and list(Path("set").rglob("*rank_1*"))


def test_what_another_wrote_is_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor what is read: with overwrite=true as well."""
    assert shard(TINY, "load_checkpoint=random", "parallel=tp2", "shard_output=par/deep/src") == 0
    for folder in ("par/strategy", "par/rank_0"):
        Path(folder).mkdir()
    Path("home").mkdir()
    Path("home/thesis.txt").write_text("years of work")
    Path("home/strategy").mkdir()  # as beside a training of MindFormers
    line = [*SHARD, TINY, "parallel=tp4", "overwrite=true", "load_checkpoint=par/deep/src"]
    for words, expected in (
        (["shard_output=home"], "home: not a sharded checkpoint"),
        (["shard_output=home/thesis.txt"], "a file, expected a folder"),
        (["shard_output=home", "only_save_strategy=true"], "home: not a folder of strategies"),
        (["shard_output=par/deep/src", "only_save_strategy=true"], "not a folder of strategies"),
        (["shard_output=par"], "shard_output: par holds the source"),
        (["shard_output=par/deep/src"], "shard_output: par/deep/src is the source"),
    ):
        refused([*line, *words], 2)
        assert expected in capsys.readouterr().err, words


def test_rank_by_rank() -> None:
    cut = [TINY, "load_checkpoint=random", "parallel=tp2"]
    for rank in range(2):
        assert shard(*cut, f"transform_rank={rank}", "shard_output=one") == 0
    assert shard(*cut, "shard_output=all") == 0
    assert contents(Path("one")) == contents(Path("all"))
    refused([*SHARD, *cut, "transform_rank=1", "shard_output=one"], 2)


def test_the_vocabulary_left_whole() -> None:
    """The default, as MindFormers': gpt2's 50257 tokens divide by nothing."""
    key = "parallel_config.vocab_emb_dp"
    assert shard(TINY, "load_checkpoint=random", "shard_output=w.ckpt") == 0
    for number, typed in enumerate([[], [f"{key}=true"], [f"{key}=false"]]):
        cut = f"cut{number}"
        line = ["load_checkpoint=w.ckpt", "parallel=tp2", f"shard_output={cut}"]
        assert shard(TINY, *line, *typed) == 0
        manifest = json.loads(Path(f"{cut}/rank_0/manifest.json").read_text())
        assert manifest["vocab_parallel"] is (number == 2)
        assert shard(TINY, f"load_checkpoint={cut}", f"shard_output={cut}.ckpt") == 0
        assert Path(f"{cut}.ckpt").read_bytes() == Path("w.ckpt").read_bytes()
    assert shard("model=gpt2", "parallel=tp2", "only_save_strategy=true") == 0


def test_predict_reads_a_sharded_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    def text(*arguments: str) -> str:
        assert main(["verbosity=0", TINY, "predict_data=hi", "max_new_tokens=6", *arguments]) == 0
        return capsys.readouterr().out

    expected = text("load_checkpoint=random")
    assert shard(TINY, "load_checkpoint=random", "parallel=tp2") == 0
    before = contents(Path("outputs/tiny_llama_tp2_dp1"))
    source = "load_checkpoint=outputs/tiny_llama_tp2_dp1"
    refused(["verbosity=0", TINY, "predict_data=hi", source], 4)
    reason = "sharded for tp=2 dp=1 (as the manifest says), this run needs tp=1"
    assert reason in capsys.readouterr().err
    assert text(source, "auto_trans_ckpt=true") == expected
    assert contents(Path("outputs/tiny_llama_tp2_dp1")) == before
    assert not Path("transformed_checkpoint").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["parallel=tp8"], 2, "model_parallel: got 8"),
        (["shard_output=x"], 2, "expected the name of a .ckpt file to merge to"),
        (
            ["transform_rank=2", "parallel=tp2"],
            2,
            "transform_rank: got 2, expected less than the 2",
        ),
        (["transform_rank=0", "parallel=tp2", "only_save_strategy=true"], 2, "writes no weights"),
        (["predict_data=hi"], 2, "predict_data has no effect with run_mode=shard"),
        (["auto_trans_ckpt=true"], 2, "auto_trans_ckpt has no effect with run_mode=shard"),
        (["load_checkpoint=gone"], 4, "gone: no such file or folder"),
        (["load_checkpoint=empty"], 4, "empty"),
        (["run_mode=predict", "predict_data=hi", "shard_output=x"], 2, "only with run_mode=shard"),
        (
            ["run_mode=predict", "predict_data=hi", "only_save_strategy=true"],
            2,
            "only_save_strategy=true needs use_parallel=true",
        ),
        (
            ["run_mode=convert", "predict_data=", "src_strategy_path_or_dir=s", "convert_output=x"],
            2,
            "src_strategy_path_or_dir has no effect",
        ),
    ],
)
def test_bad_input(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, expected: str
) -> None:
    Path("empty").mkdir()
    refused([*SHARD, TINY, *arguments], code)
    assert expected in capsys.readouterr().err


def test_transform_process_num_of_a_mindformers_yaml_means_nothing_in_predict() -> None:
    Path("mf.yaml").write_text("transform_process_num: 4\nuse_parallel: false\n")
    line = parse(["--config", "mf.yaml", TINY, "predict_data=x"], heads())
    config, notes = resolve(line)
    assert (
        not hasattr(config, "transform_process_num") and "transform_process_num" in notes[0].detail
    )
    line = parse(["--config", "mf.yaml", TINY, "run_mode=shard"], heads())
    assert resolve(line)[0].transform_process_num == 4


# The child cuts a checkpoint whose tensors are slow to read, so that it can be killed anywhere.
SLOW = """
import time
from pathlib import Path
from lite_runner.config.sections import Ranks
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.sharding.shard_writer import Cutting, write_shards
from lite_runner.weights import LazyTensor
from tests.models import model_named
model = model_named("tiny_llama")
def slow(tensor):
    def read():
        time.sleep(0.02)
        return tensor.read()
    return LazyTensor(tensor.shape, tensor.dtype, read)
tensors = {name: slow(tensor) for name, tensor in random_checkpoint(model, 1).items()}
cutting = Cutting.of_model(model, Ranks(0, 1, 2), "ckpt", vocab_parallel=True)
write_shards(Path("set"), tensors, cutting, extra={}, workers=1, overwrite=True,
             advance=lambda size: print(size, flush=True))
print("written", flush=True)
"""


@pytest.mark.parametrize("reads", [1, 12, 25, 39, 42])
def test_killed_at_any_point_the_old_set_stands(reads: int) -> None:
    """Of 42 reads (21 tensors, two ranks) the last ones are followed by syncing and renaming."""
    assert shard(TINY, "load_checkpoint=random", "parallel=tp4", "shard_output=set") == 0
    old = contents(Path("set"))
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert child.stdout is not None
    for _ in range(reads):
        assert child.stdout.readline().strip().isdigit()
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    found = contents(Path("set"))
    if found != old:  # killed so late that the new one stood there
        assert reads == 42 and not Path("set/rank_2").exists()
    whole_tensors(Path("set"), model_named("tiny_llama"))  # complete, with the right sha256
