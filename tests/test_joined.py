"""Ranks of a job, whoever starts them: one result, as of one process."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lite_runner import app, joined
from lite_runner.config.argv import parse
from lite_runner.config.parallel import SOCKET_VARIABLE
from lite_runner.distributed.events import FOLDER_VARIABLE, Event
from lite_runner.distributed.join import Joined
from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from lite_runner.errors import ArtifactError
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.weights.sharding.shards import ShardSet
from tests.light_msrun import light_package
from tests.paths import ROOT

RUN_LITE = str(ROOT / "run_lite.py")
PROMPTS = ["hello there", "a b c", "the third, 中文"]
SETTINGS = ["model=tiny_llama", "max_new_tokens=8", "context.device_target=CPU"]
# 004's run_predict.sh, with this project's command.
LOOP = """
export RANK_TABLE_FILE=$1
export RANK_SIZE=2
export START_RANK=0 # this server start rank
export END_RANK=2 # this server end rank
for((i=${START_RANK}; i<${END_RANK}; i++))
do
    export RANK_ID=$i
    export DEVICE_ID=$((i-START_RANK))
    python3 %s "${@:2}" &> rank_$RANK_ID.txt &
done
wait
"""
# Two ranks as on two machines, where the path of the other's memory leads nowhere; with one CPU.
ELSEWHERE = """
import sys
from lite_runner import app
from lite_runner.native import peers
from lite_runner.system import environment

def elsewhere(*_):
    raise FileNotFoundError

peers._opened = elsewhere
environment.cores = lambda processes=1: 1
sys.exit(app.main(sys.argv[1:]))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def msrun(program: str) -> list[str]:
    options = ["--worker_num=2", "--local_worker_num=2", "--join=True", "--log_dir=logs"]
    return ["msrun", *options, f"--master_port={free_port()}", program]


def start(folder: Path, command: list[str], modules: str) -> subprocess.Popen[str]:
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": modules},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """The folder, exit code and output of each job; run at once, since most of it is waiting."""
    base = tmp_path_factory.mktemp("joined")
    table = base / "hccl_2p.json"
    devices = (Device(0, "192.168.0.0"), Device(1, "192.168.0.1"))
    RankTable((TableServer("10.0.0.7", devices),)).write(table)
    (base / "loop.sh").write_text(LOOP % shlex.quote(RUN_LITE))
    (base / "dist.yaml").write_text("parallel_config: {data_parallel: 1, model_parallel: 2}\n")
    data = ["--predict_data", *PROMPTS]
    (base / "elsewhere.py").write_text(ELSEWHERE)
    flags = ["--config", "../dist.yaml", "--use_parallel", "True", "profile=true"]
    drawn = [*SETTINGS, "do_sample=true", "seed=4", "logprobs=1", "prompt_logprobs=1", *data]
    light = light_package(tmp_path_factory.mktemp("light"))
    started = {
        "elsewhere": [*msrun("../elsewhere.py"), *flags, *SETTINGS, "context.threads=1", *data],
        "loop": ["bash", "../loop.sh", str(table), "parallel=dp2", "profile=true", *drawn],
    }
    running = {name: start(base / name, command, light) for name, command in started.items()}
    done = {}
    for name, words in (("one", [*SETTINGS, *data]), ("drawn", drawn)):
        (base / name).mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(base / name)
            done[name] = (base / name, app.main(words), "")
    for name, process in running.items():
        output, _ = process.communicate(timeout=300)
        done[name] = (base / name, process.returncode, output)
    return done


def result(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "outputs/latest/result.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("name", "alone", "logs"),
    [("elsewhere", "one", "logs/worker_{}.log"), ("loop", "drawn", "rank_{}.txt")],
)
def test_ranks_write_what_one_process_writes(
    jobs: dict[str, tuple[Path, int, str]], name: str, alone: str, logs: str
) -> None:
    folder, code, output = jobs[name]
    assert code == 0, output
    (run,) = (folder / "outputs").glob("*-*-*/*")  # one for all of them
    assert result(folder)["results"] == result(jobs[alone][0])["results"]
    assert result(folder)["world_size"] == 2
    assert ("the model are on several machines" in output) == (name == "elsewhere")
    note = "note: context.threads=1 of each of 2 ranks: this process may use 1 CPU(s)"
    assert output.count(note) == (name == "elsewhere")
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "rank_0.log", "rank_1.log"} <= names
    printed = (folder / logs.format(0)).read_text() if name == "loop" else output
    text = result(folder)["results"][2]["text"]
    assert printed.count(text + "\n") == 1
    assert text not in (folder / logs.format(1)).read_text(encoding="utf-8", errors="replace")
    kept, expected = (
        yaml.safe_load((one / "outputs/latest/config.yaml").read_text())
        for one in (folder, jobs[alone][0])
    )
    assert kept["predict_data"] == expected["predict_data"] == PROMPTS


def test_ranks_that_others_started_have_a_profile(jobs: dict[str, tuple[Path, int, str]]) -> None:
    """Without a launcher of ours; replicas exchange nothing in a forward pass, and of ranks on
    several machines it is not known how long they waited."""
    found = {name: result(jobs[name][0])["profile"]["processes"] for name in ("loop", "elsewhere")}
    for ranks in found.values():
        assert [one["name"] for one in ranks] == ["rank 0", "rank 1"]
    for one in found["loop"]:
        assert [each["name"] for each in one["collectives"]] == ["gather"]
        assert one["steps"]["new_tokens"] > 0
    for one in found["elsewhere"]:
        each = {each["name"]: each for each in one["collectives"]}["all_reduce"]
        assert each["seconds"] > 0 and each["bytes"] > 0 and each["waiting_s"] is None


def test_a_failure_of_a_launched_rank_is_sent(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(events))
        listener.listen()
        environ = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_NODE_ID": "1"}
        environ |= {"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "RANK_ID": "1"}
        environ |= {SOCKET_VARIABLE: str(events), FOLDER_VARIABLE: str(tmp_path)}
        words = ["model=tiny_llama", "predict_data=a", "parallel=tp2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "lite_runner", *words, "context.device_target=Ascend"],
            cwd=ROOT,
            env={**os.environ, **environ},
            stderr=subprocess.DEVNULL,
        )
        connection, _ = listener.accept()
        with closing(connection), connection.makefile("rb") as lines:
            received = [Event.from_line(line) for line in lines]
    assert process.wait() == 3
    assert (received[0].rank, received[0].event, received[0].text) == (1, "stage", "started")
    assert (received[-1].event, received[-1].exit_code) == ("error", 3)
    assert "no Ascend device" in received[-1].message
    assert (tmp_path / "rank_1.log").is_file()


def test_the_first_rank_plans_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tokenizes the prompts and verifies the shards that both read."""
    monkeypatch.chdir(tmp_path)
    words = ["model=tiny_llama", "parallel=tp2", "parallel_config.vocab_emb_dp=false"]
    assert app.main(["run_mode=shard", *words, "shard_output=cut"]) == 0
    prompts = "predict_data=[{prompt: hi, top_k: 3}, {prompt: ho}]"
    words += ["load_checkpoint=cut", "backend=ms", "do_sample=true", prompts]
    config, _ = resolve(parse(words, heads()))
    payloads: list[bytes] = []

    def gather(payload: bytes) -> list[bytes]:
        payloads.append(payload)
        return [payload, b""]

    monkeypatch.setattr(joined, "gather", gather)
    plan, _ = joined._share_plan(config, Joined(0, 2, (0, 1), None))
    answers = iter([[payloads[0], b""], [payloads[1], b""]])
    monkeypatch.setattr(joined, "gather", lambda payload: next(answers))
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", None)
        patch.setattr(ShardSet, "verify", lambda self, needed: assert_none(needed))
        other, _ = joined._share_plan(config, Joined(1, 2, (0, 1), None))
    assert other.work == plan.work and other.work.options[0].top_k == 3
    assert other.config == plan.config and other.config.seed is not None
    assert other.model == plan.model and other.model.verified
    file = Path("cut/rank_1/checkpoint_1.ckpt")
    content = bytearray(file.read_bytes())
    content[-700] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr(joined, "gather", gather)
    with pytest.raises(ArtifactError, match=r"checkpoint_1\.ckpt: another file than the one"):
        joined._share_plan(config, Joined(0, 2, (0, 1), None))


def assert_none(needed: set[int]) -> None:
    assert not needed


def test_no_process_is_left(jobs: dict[str, tuple[Path, int, str]]) -> None:
    base = str(jobs["loop"][0].parent)

    def is_of_a_job(process: psutil.Process) -> bool:
        try:
            return process.cwd().startswith(base)
        except psutil.Error:
            return False

    _, alive = psutil.wait_procs(filter(is_of_a_job, psutil.process_iter()), timeout=20)
    assert not alive


# A rank that does not come to its next step after Ctrl-C.
DEAF = """
import os, signal, sys, time
from pathlib import Path
from lite_runner.system.signals import handled

with handled():
    from lite_runner.distributed import stopping
    from lite_runner.distributed.stopping import StopFlags

    flags = StopFlags.create(Path(sys.argv[1]), 2)
    flags.set_generating()
    if sys.argv[2] == "late":
        stopping.STOP_S = 0.5
    with stopping.stop_or_exit_on_ctrl_c(flags):
        os.kill(os.getpid(), signal.SIGINT)
        while not flags.stop_requested:
            time.sleep(0.01)
        if sys.argv[2] == "second":
            os.kill(os.getpid(), signal.SIGINT)
        if sys.argv[2] != "in time":
            while True:
                time.sleep(0.01)
print("done")
"""


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ("in time", 0, ("done\n", "")),
        ("second", 130, ("", "interrupted\n")),
        ("late", 130, ("", "interrupted: the ranks did not stop within 0 s\n")),
    ],
)
def test_a_rank_is_waited_for_until_a_second_ctrl_c_or_for_some_time(
    tmp_path: Path, how: str, code: int, says: tuple[str, str]
) -> None:
    command = [sys.executable, "-c", DEAF, str(tmp_path / "flags"), how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, (done.stdout, done.stderr)) == (code, says)


@pytest.mark.parametrize("role", ["MS_WORKER", "MS_SCHED"])
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "use_parallel=false: each would do the whole job"),
        (["parallel=tp4"], 2, "expected 4: data_parallel=1 * model_parallel=4"),
        (["use_parallel=true"], 2, "parallel_config.model_parallel=2"),
        (["run_mode=convert", "convert_output=x"], 2, "run_mode=convert runs in one process"),
        (["--multirun", "seed=1,2"], 2, "--multirun"),
        ([], 3, "MS_SCHED_HOST"),
    ],
)
def test_jobs_that_cannot_be_joined_are_refused_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    role: str,
    words: list[str],
    code: int,
    says: str,
) -> None:
    environ = {"MS_ROLE": role, "MS_WORKER_NUM": "2", "MS_SCHED_PORT": "8118", "RANK_ID": "0"}
    if code == 2:
        environ["MS_SCHED_HOST"] = "127.0.0.1"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if "convert_output=x" not in words:
        words = [*words, "predict_data=a"]
    assert app.main(["model=tiny_llama", *words]) == code
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_threads_than_cpus_are_noted_by_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine starts its own ranks, of those that the run has."""
    monkeypatch.setattr(environment, "cores", lambda processes=1: 8 // processes)
    cluster = {"MS_WORKER_NUM": "4", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118"}
    machine = {"MS_ROLE": "MS_WORKER", "MS_LOCAL_WORKER": "2", "MS_NODE_RANK": "1"}
    for name, value in {**cluster, **machine}.items():
        monkeypatch.setenv(name, value)
    for threads, notes in ((4, 0), (5, 1)):
        words = ["model=tiny_llama", "predict_data=a", "parallel=tp4", "dry_run=true"]
        assert app.main([*words, f"context.threads={threads}"]) == 0
        err = capsys.readouterr().err
        assert err.count("context.threads=") == 2 * notes, err
        assert err.count("context.threads=5 of each of 2 ranks: this process may use 8") == notes


def test_one_worker_is_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "cores", lambda processes=1: 1)
    words = ["model=tiny_llama", "predict_data=a", "dry_run=true", f"output_dir={tmp_path}"]
    words += ["context.threads=2"]
    cluster = {"MS_WORKER_NUM": "1", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118"}
    for name, value in {**cluster, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert app.main(words) == 0
    shown = capsys.readouterr()
    assert "tiny_llama" in shown.out
    assert shown.err.count("note: context.threads=2: this process") == 1
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")  # which msrun waits for
    assert app.main(words) == 0
    assert capsys.readouterr().out == ""
