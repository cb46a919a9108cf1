"""Exported models and several ranks: graphs for each rank, and the same graph for copies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mindspore.train.mind_ir_pb2 import ModelProto

from lite_runner.app import main
from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from lite_runner.mindir.manifest import read_manifest
from lite_runner.mindir.writer import ASCEND_GROUP, name_group
from tests.forks import forks
from tests.light_msrun import light_package
from tests.paths import ROOT
from tests.refusals import refused

MODEL = ("model=tiny_llama", "model.model_config.num_layers=1")
JOB = (*MODEL, "max_new_tokens=6", "eos_token_id=[]", "context.device_target=CPU")
PROMPTS = ("predict_data=[I love Beijing,what color]",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, lite_python: Path) -> Path:
    """The folder of this file's jobs: a checkpoint sharded for two ranks in cut/, exported for
    two ranks to x/, and what a single process, two ranks of x/ and two copies say."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LITE_RUNNER_CACHE", str(folder / "cache"))
        assert main(["run_mode=shard", *MODEL, "parallel=tp2", "shard_output=cut"]) == 0
        assert main([*JOB, *PROMPTS, "output_dir=single"]) == 0
    table = folder / "hccl_2p.json"
    devices = (Device(0, "192.168.0.0"), Device(1, "192.168.0.1"))
    RankTable((TableServer("10.0.0.7", devices),)).write(table)
    export = ("run_mode=export", "load_checkpoint=cut", "export_output=x", "predict_batch_size=2")
    export = (*MODEL, *export, "parallel=tp2", "infer.infer_seq_length=64")
    offline = (*JOB, *PROMPTS, "backend=mslite")
    exported = (*offline, "parallel=tp2", "infer.model_dir=x", "output_dir=tp2")
    copies = ("parallel=dp2", "engine=lite-worker", "load_checkpoint=cut")
    cache = {"LITE_RUNNER_CACHE": str(folder / "cache")}

    def run_rank(rank: int) -> None:
        environ = {"RANK_TABLE_FILE": str(table), "RANK_SIZE": "2"}
        environ |= {"RANK_ID": str(rank), "DEVICE_ID": str(rank)}
        with forks(tmp_path_factory.mktemp("streams")) as started:
            for words in (export, exported):
                done = started.run(*words, cwd=folder, **cache, **environ)
                assert done.returncode == 0, done.stderr

    # Two are ranks of a loop over a rank table, which take less than msrun and its scheduler.
    with ThreadPoolExecutor() as pool:
        list(pool.map(run_rank, range(2)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_lite.py"), *offline, *copies, "output_dir=dp2"],
        cwd=folder,
        env={**os.environ, **cache, "PYTHONPATH": light_package(tmp_path_factory.mktemp("light"))},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    return folder


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "latest/result.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_a_cut_checkpoint_is_exported_for_each_rank(folder: Path) -> None:
    manifest = read_manifest(folder / "x")
    source = str(folder / "cut")  # ranks take whole paths
    assert (manifest.ranks, manifest.layout, manifest.source) == (2, "static_pair", source)
    names = {"prefill": "mindir_full_checkpoint", "increment": "mindir_inc_checkpoint"}
    for rank in (0, 1):
        wanted = {name: folder / f"x/{one}/rank_{rank}.mindir" for name, one in names.items()}
        assert manifest.paths(folder / "x", rank) == wanted
    one, other = (path.read_bytes() for path in (folder / "x/mindir_inc_checkpoint").iterdir())
    assert one != other


@pytest.mark.parametrize(("job", "engine"), [("tp2", "graph-cell"), ("dp2", "lite-worker")])
def test_ranks_say_what_one_process_says(folder: Path, job: str, engine: str) -> None:
    got, expected = result(folder / job), result(folder / "single")
    assert (got["backend"], got["engine"], got["world_size"]) == ("mslite", engine, 2)
    assert got["results"] == expected["results"] and len(got["results"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "exported for 2 ranks that share the model, got model_parallel=1"),
        (["parallel=dp2tp2"], "data_parallel and model_parallel above 1 together need backend=ms"),
        (["parallel=dp2", "run_mode=export"], "all replicas run the same graphs"),
        (["parallel=tp2", "export.layout=resizable"], "needs export.layout=static_pair"),
    ],
)
def test_ranks_and_exports_that_do_not_match(
    folder: Path,
    settings: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    given = [] if "run_mode=export" in settings else [*PROMPTS, "infer.model_dir=x"]
    refused([*MODEL, "backend=mslite", *given, *settings], 2)
    assert message in capsys.readouterr().err


def test_graphs_for_ascend_call_its_own_collectives(folder: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(folder / "x/mindir_full_checkpoint/rank_1.mindir", tmp_path))
    before = groups(file)
    assert before and before != {ASCEND_GROUP}
    name_group(file, ASCEND_GROUP)
    assert groups(file) == {ASCEND_GROUP}


def groups(file: Path) -> set[str]:
    primitives = ModelProto.FromString(file.read_bytes()).primitives
    return {one.s.decode() for each in primitives for one in each.attribute if one.name == "group"}
