"""run_lite.py with several ranks: a single process's result, from one machine and from two."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.light_msrun import light_package
from tests.paths import ROOT

PROMPT = "I love Beijing, because"
JOB = ("model=tiny_llama", "max_new_tokens=12", "context.device_target=CPU")
TP2 = (*JOB, "parallel=tp2")
GUIDED = [
    {"prompt": "a", "guided_regex": "[0-9]{5}", "do_sample": True, "temperature": 2},
    {"prompt": "b", "guided_choice": ["yes", "no"]},
]


@dataclass
class Done:
    folder: Path  # of the run
    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        found = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """All jobs of this file, run at once: most of their time they wait for ranks to meet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = f"predict_data={json.dumps([{'prompt': PROMPT}, *GUIDED])}"
    node = (*TP2, asked, "parallel.local_worker_num=1", f"parallel.master_port={port}")
    commands = {
        "single": (*JOB, "predict_data=-"),
        "tp2": (*TP2, "predict_data=-", "profile=true"),
        "node 0": (*node, "parallel.node_rank=0"),
        "node 1": (*node, "parallel.node_rank=1"),
        "too long": (*TP2, "max_new_tokens=null", "predict_data=" + "x" * 5000),
    }
    light = light_package(tmp_path_factory.mktemp("light"))
    started = {}
    for name, words in commands.items():
        folder = tmp_path_factory.mktemp("job")
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run_lite.py"), *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": light if name.startswith("node") else ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        assert process.stdin is not None
        process.stdin.write(PROMPT)
        process.stdin.close()
        process.stdin = None
        started[name] = (process, folder / "outputs/latest")
    return {
        name: Done(folder, process.wait(), *process.communicate())
        for name, (process, folder) in started.items()
    }


def test_two_ranks_say_what_one_says(jobs: dict[str, Done]) -> None:
    single, job = jobs["single"], jobs["tp2"]
    assert (single.code, job.code) == (0, 0), job.err
    assert job.out == single.out and len(job.out) > 1
    (expected,), (row,) = single.result["results"], job.result["results"]
    assert row == expected
    assert len(row["token_ids"]) == 12 and row["prompt"] == PROMPT
    assert (single.result["world_size"], job.result["world_size"]) == (1, 2)
    assert job.err.count("12 tokens, load") == 1


def test_ranks_of_two_machines_say_it_too_and_follow_grammars(jobs: dict[str, Done]) -> None:
    job = jobs["node 0"]
    assert job.code == 0, job.err
    row, *guided = job.result["results"]
    assert row == jobs["single"].result["results"][0] and job.result["world_size"] == 2
    first, second = (row["text"] for row in guided)
    assert job.out == "".join(f"{one}\n" for one in (row["text"], first, second))
    assert re.fullmatch("[0-9]{5}", first) and second in ("yes", "no")


def test_the_second_machine_prints_nothing(jobs: dict[str, Done]) -> None:
    second = jobs["node 1"]
    assert (second.code, second.out, second.err) == (0, "", "")
    names = {path.name for path in second.folder.iterdir()}
    assert "rank_1.log" in names and not {"rank_0.log", "result.json"} & names
    assert (second.folder / "msrun/worker_1.log").is_file()


def test_every_rank_has_a_log(jobs: dict[str, Done]) -> None:
    names = {path.name for path in jobs["tp2"].folder.iterdir()}
    assert {"config.yaml", "run.log", "rank_0.log", "rank_1.log", "msrun"} <= names
    assert "12 tokens, load" in (jobs["tp2"].folder / "run.log").read_text(encoding="utf-8")
    for rank in range(2):  # from the start
        assert "join the 2 ranks" in (jobs["tp2"].folder / f"rank_{rank}.log").read_text()


def test_a_profile_has_all_ranks_and_their_launcher(jobs: dict[str, Done]) -> None:
    job = jobs["tp2"]
    profile = job.result["profile"]
    launcher, *ranks = profile["processes"]
    assert {"start", "plan", "ranks"} <= set(launcher["phases"])
    assert [one["name"] for one in ranks] == ["rank 0", "rank 1"]
    for one in ranks:
        assert {"start", "import", "meet", "prefill", "decode", "gather"} <= set(one["phases"])
        assert sum(one["phases"].values()) == pytest.approx(one["seconds"], rel=1e-3)
        found = {each["name"]: each for each in one["collectives"]}
        # The embedding and the two matrices of each of two layers; the head.
        assert (found["all_reduce"]["calls"], found["all_gather"]["calls"]) == (5 * 12, 12)
        for each in found.values():
            parts = each["waiting_s"], each["moving_s"]
            assert min(parts) >= 0 and sum(parts) == pytest.approx(each["seconds"])
        exchanged = found["all_reduce"]["seconds"] + found["all_gather"]["seconds"]
        spent = sum(each["seconds"] for each in one["kernels"])
        assert exchanged + spent <= one["steps"]["forward_s"]
        assert f"{one['name']} all_reduce" in job.err

    events = json.loads((job.folder / "trace.json").read_text("utf-8"))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert [*names.values()] == ["launcher", "rank 0", "rank 1"]
    spans = [one for one in events if one["ph"] == "X"]
    assert {one["pid"] for one in spans if one["cat"] == "collective"} == {2, 3}
    for one in spans:
        assert one["ts"] >= 0 and one["dur"] >= 0
        assert one["ts"] + one["dur"] <= profile["seconds"] * 1e6 + 1


def test_errors_show_before_ranks_start(jobs: dict[str, Done]) -> None:
    failed = jobs["too long"]
    assert (failed.code, failed.out) == (2, "")
    assert "error: prompt 0 does not fit: 5000 tokens" in failed.err
    assert not (failed.folder / "msrun").exists()
