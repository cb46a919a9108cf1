"""Ctrl-C while several ranks generate: they write partial results, as a single process does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from tests.paths import ROOT

# More than could be done before Ctrl-C arrives, and after the first text it does.
PROMPTS = [f"prompt {number}" for number in range(200)]
JOB = ("model=tiny_llama", "context.device_target=CPU", "eos_token_id=[]", "max_new_tokens=200")
FEW = ("predict_batch_size=4", "--predict_data", *PROMPTS)


@dataclass
class Ended:
    folder: Path  # of the run
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        found = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))["results"]
        assert isinstance(found, list)
        return found


def start(folder: Path, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run_lite.py"), *JOB, *words, *FEW],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # so that nothing is read beyond the first line
    )


def interrupt(
    folder: Path, process: subprocess.Popen[bytes], *, by: subprocess.Popen[bytes]
) -> Ended:
    """The end of a job in `folder` whose rank 0, or launcher, is `process`. Ctrl-C goes to `by`
    when the first text is complete and others are under way."""
    assert process.stdout is not None
    first = process.stdout.readline()
    by.send_signal(signal.SIGINT)
    rest, err = process.communicate()
    latest = folder / "outputs/latest"
    return Ended(latest, process.returncode, (first + rest).decode(), err.decode())


def assert_cut_short(ended: Ended) -> None:
    """Whole texts, then those that were under way, then those that were not begun."""
    assert ended.code == 130
    rows = ended.rows
    assert [row["prompt"] for row in rows] == PROMPTS
    reasons = Counter(row["finish_reason"] for row in rows)
    assert reasons.keys() == {"length", "interrupted"}
    for row in rows:
        whole = row["finish_reason"] == "length"
        assert (row["generated_tokens"] == 200) is whole
    assert ended.out == "".join(row["text"] + "\n" for row in rows)
    assert (ended.folder / "text_generation_result.txt").is_file()
    assert "tokens, load" in ended.err and ended.err.count("interrupted\n") == 1


@pytest.mark.usefixtures("light_msrun")
def test_partial_results_are_written(tmp_path: Path) -> None:
    """By replicas, which are not at the same step; ranks that share a model stop at one step below,
    and both together in test_stopping.py."""
    launcher = start(tmp_path, ["parallel=dp2"])
    assert_cut_short(interrupt(tmp_path, launcher, by=launcher))

    def is_of_the_job(process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(tmp_path)
        except psutil.Error:
            return False

    mine = filter(is_of_the_job, psutil.process_iter())
    _, alive = psutil.wait_procs((one for one in mine if one.pid != os.getpid()), timeout=20)
    assert not alive


def test_ranks_that_somebody_else_started(tmp_path: Path) -> None:
    """Those of a loop over a rank table. Ctrl-C comes to one here, on a terminal to all."""
    table = tmp_path / "hccl_2p.json"
    devices = (Device(0, "192.168.0.0"), Device(1, "192.168.0.1"))
    RankTable((TableServer("10.0.0.7", devices),)).write(table)
    ranks = [
        start(
            tmp_path,
            ["parallel=tp2"],
            RANK_TABLE_FILE=str(table),
            RANK_SIZE="2",
            RANK_ID=str(rank),
            DEVICE_ID=str(rank),
        )
        for rank in range(2)
    ]
    assert_cut_short(interrupt(tmp_path, ranks[0], by=ranks[1]))
    assert ranks[1].communicate()[0] == b"" and ranks[1].returncode == 130
