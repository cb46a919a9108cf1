"""The process of one rank: what it says, writes and exits with; two of them as data parallel."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from lite_runner.config.argv import parse
from lite_runner.config.cluster import Cluster
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import RunConfig
from lite_runner.distributed.events import SOCKET_VARIABLE, Event
from lite_runner.distributed.job import Limits, run_ranks
from lite_runner.generation import GenerationTiming
from lite_runner.output.merge import RankResult, merge
from lite_runner.output.report import RowResult
from lite_runner.run_modes import heads, resolve
from lite_runner.shared_plan import plan_for_ranks
from tests.paths import ROOT

PROMPTS = "predict_data=['hello there','a b c','the third, \\u4e2d\\u6587']"


def resolved(*settings: str) -> RunConfig:
    return resolve(parse(["model=tiny_llama", *settings], heads()))[0]


def write_plan(folder: Path, config: RunConfig) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_for_ranks(config).to_dict()), encoding="utf-8")
    return path


def test_two_copies_write_what_one_process_writes(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    sampling = ("do_sample=true", "seed=4", "max_new_tokens=12", PROMPTS)
    command = [sys.executable, str(ROOT / "run_lite.py"), "model=tiny_llama", *sampling]
    alone = subprocess.run([*command, f"output_dir={tmp_path}"], capture_output=True, check=True)
    folder = tmp_path / "ranks"
    folder.mkdir()
    snapshot = write_plan(folder, resolved("parallel=dp2", *sampling))
    capfdbinary.readouterr()
    program = [str(ROOT / "lite_runner/rank.py"), str(snapshot), str(folder)]
    run_ranks(program, Cluster(2, 2), folder, Limits(rendezvous=120, total=300))
    assert capfdbinary.readouterr().out == alone.stdout
    expected = json.loads((tmp_path / "latest/result.json").read_text(encoding="utf-8"))
    found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert found["results"] == expected["results"]
    assert (expected["world_size"], found["world_size"]) == (1, 2)
    for rank in range(2):
        assert "meet the 2 ranks" in (folder / f"rank_{rank}.log").read_text()


@pytest.mark.parametrize(
    ("content", "exit_code", "message"),
    [
        (b"\xff", 3, "cannot be read"),
        (b"[]", 2, "no plan of a run"),
        (b'{"config": {"run_mode": "dance"}}', 2, "run_mode: got 'dance'"),
    ],
)
def test_a_failure_is_told_and_keeps_its_exit_code(
    tmp_path: Path, content: bytes, exit_code: int, message: str
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    events = tmp_path / "events"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(events))
        listener.listen()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "lite_runner.rank",
                str(tmp_path / "plan.json"),
                str(tmp_path),
            ],
            cwd=ROOT,
            env={**os.environ, SOCKET_VARIABLE: str(events), "RANK_ID": "1"},
            stderr=subprocess.DEVNULL,
        )
        connection, _ = listener.accept()
        with closing(connection), connection.makefile("rb") as lines:
            said = [Event.from_line(line) for line in lines]
    assert process.wait() == exit_code
    assert (said[0].rank, said[0].event, said[0].text) == (1, "stage", "started")
    assert (said[-1].event, said[-1].exit_code) == ("error", exit_code)
    assert message in said[-1].message
    assert (tmp_path / "rank_1.log").is_file()


def test_a_rank_ends_when_the_launcher_hangs_up(tmp_path: Path) -> None:
    events = tmp_path / "events"
    program = "import time\nfrom lite_runner.distributed.events import connect\nconnect(0)\n"
    program += "time.sleep(60)"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(events))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, SOCKET_VARIABLE: str(events)},
        )
        listener.accept()[0].close()
    assert process.wait() == 1


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b'{"rank": 0}', b'{"rank": "0", "event": "done"}', b'{"rank": 0, "event": "x"}',
     b'{"rank": 0, "event": "text", "more": 1}', b"\xff", b'{"rank": 0, "event": []}'],
)  # fmt: skip
def test_what_is_no_event_is_a_value_error(line: bytes) -> None:
    with pytest.raises(ValueError):
        Event.from_line(line)


def test_an_event_survives_its_line() -> None:
    event = Event(
        rank=3, event="error", exit_code=4, message="a\nb \ud800", hint="é", traceback="t"
    )
    line = event.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert Event.from_line(line) == event


def test_shares_are_put_together_in_the_order_of_the_copies() -> None:
    def share(name: str, seconds: float) -> RankResult:
        found = [{"token": 1, "logprob": -0.5, "top": [[1, -0.5]]}]
        row = RowResult(
            name, "text", (1, 2), 3, 2, "stop", logprobs=found, prompt_logprobs=[None, *found]
        )
        timing = GenerationTiming(seconds, 2 * seconds, seconds, 30, 20)
        return RankResult(rows=[row], generation=timing, load_s=seconds, peak_rss_mib=10.0)

    parts = [share("a", 1.0), share("a", 1.0), share("b", 4.0), RankResult(peak_rss_mib=5.0)]
    whole = merge([RankResult.from_bytes(part.to_bytes()) for part in parts], 2)
    assert [row.prompt for row in whole.rows] == ["a", "b"]
    assert [row.prompt_logprobs[1] for row in whole.rows] == whole.rows[0].logprobs * 2
    timing = whole.timing()
    assert (timing.prefill_tok_s, timing.decode_tok_s) == (60 / 4.0, 40 / 8.0)
    assert (timing.load_s, timing.time_to_first_token_s) == (4.0, 5.0)
    assert whole.peak_rss_mib == 35.0


@pytest.mark.parametrize(("prompts", "copies"), [(7, 3), (2, 4), (4, 2), (1, 1)])
def test_prompts_are_shared_evenly_and_in_order(prompts: int, copies: int) -> None:
    from lite_runner.config.prompt import Request
    from lite_runner.plan.job import Job, share

    config = resolved("predict_data=hi")
    every = [Request(str(index)) for index in range(prompts)]
    whole = Job(every, [[index] for index in range(prompts)], config.generation(), prompts, 9)
    parts = [share(config, whole, Ranks(rank, copies)) for rank in range(copies)]
    assert [one for part in parts for one in part.requests] == every
    assert max(len(part.tokens) for part in parts) - min(len(part.tokens) for part in parts) <= 1
    assert [part.first_index for part in parts if part.requests] == [
        int(part.requests[0].text) for part in parts if part.requests
    ]
    assert len(parts[0].tokens) >= 1  # rank 0, which writes the results, always has work
