"""--multirun through Hydra's launchers, sweepers and callbacks."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra.experimental.callback import Callback

from lite_runner.config.argv import CommandLine, parse
from lite_runner.errors import ConfigError, EnvironmentFault, RunnerError
from lite_runner.run_modes import heads
from lite_runner.sweep import run_sweep
from tests.paths import ROOT

PYTHON = ROOT / ".venv-cluster/bin/python"
TINY = ("model=tiny_llama", "predict_data=hi", "max_new_tokens=2")


class Notes(Callback):
    """The arguments that Hydra gives a callback."""

    events: list[str] = []  # noqa: RUF012 (Hydra makes the instance)

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        self.events.append(f"{self.prefix} start")

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        self.events.append(" ".join(job_return.overrides))

    def on_multirun_end(self, config: Any, **_: Any) -> None:
        self.events.append("end")


class Jobs:
    """In place of processes: leaves a result.json whose figures follow from the seed."""

    def __init__(self, codes: tuple[int, ...] = (0, 0, 0, 0, 0, 0)) -> None:
        self.codes = iter(codes)
        self.seen: list[dict[str, str]] = []

    def run(self, line: CommandLine, link: Path) -> int:
        self.seen.append({s.key: str(s.value) for s in line.settings})
        link.mkdir()
        rate = 10.0 * float(line.last("seed") or 0)
        content = {"timing": {"decode_tok_s": rate}, "results": [{"generated_tokens": 2}]}
        (link / "result.json").write_text(json.dumps(content), encoding="utf-8")
        return next(self.codes)


def sweep(*words: str, codes: tuple[int, ...] = (0,) * 9) -> tuple[int, Jobs, Path]:
    jobs = Jobs(codes)
    code = run_sweep(parse(["-m", *TINY, *words], heads()), jobs.run)
    return code, jobs, Path("outputs/latest").resolve()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_combinations_run_and_are_summarized(capsys: pytest.CaptureFixture[str]) -> None:
    code, jobs, folder = sweep(
        "seed=1,2", "temperature=0.5,1", "do_sample=true", codes=(0, 4, 1, 0)
    )
    assert code == 4
    chosen = [(job["seed"], job["temperature"]) for job in jobs.seen]
    assert chosen == [("1", "0.5"), ("1", "1"), ("2", "0.5"), ("2", "1")]
    assert jobs.seen[0]["predict_data"] == "hi"
    lines = (folder / "sweep.md").read_text().splitlines()
    assert [cell.strip() for cell in lines[3].split("|")] == ["", "2", "1", "1", "4", "10.0", ""]
    stderr = capsys.readouterr().err
    assert "job 2 of 4: seed=1 temperature=1" in stderr and lines[3] in stderr
    [first, *_] = json.loads((folder / "sweep.json").read_text())
    assert first["figures"] == {"timing.decode_tok_s": 10.0, "generated_tokens": 2}
    assert (folder / "sweep.svg").read_text().count("decode, tokens/s") >= 1


def test_the_later_of_two_settings_counts() -> None:
    code, jobs, _ = sweep("seed=1,2", "temperature=2", "seed=5,6", "temperature=1")
    assert code == 0
    assert [(job["seed"], job["temperature"]) for job in jobs.seen] == [("5", "1"), ("6", "1")]


def test_files_of_others_in_the_sweeps_folder() -> None:
    for name, text in (("a", "{}"), ("b", "[]"), ("c", "no json"), ("d", '{"began": 1e300}')):
        Path("swept", name).mkdir(parents=True)
        Path("swept", name, "job.json").write_text(text)
    assert sweep("seed=1", "hydra.sweep.dir=swept")[0] == 0
    assert len(json.loads(Path("swept/sweep.json").read_text())) == 1


def test_a_sweeper_of_hydra_chooses_the_jobs() -> None:
    code, jobs, _ = sweep("hydra.sweeper.max_batch_size=2", "seed=choice(1,2,3)", "stop=a,b")
    assert code == 0
    assert [(job["seed"], job["stop"]) for job in jobs.seen] == [(n, "a,b") for n in "123"]


def test_callbacks_and_folders_are_hydras() -> None:
    Notes.events.clear()
    target = f"{Notes.__module__}.{Notes.__qualname__}"
    sweep(
        *(
            "seed=1,2",
            "verbosity=0",
            "hydra.sweep.dir=swept",
            "hydra.sweep.subdir=job${hydra.job.num}",
        ),
        f"+hydra.callbacks.mine={{_target_: {target}, prefix: mine}}",
    )
    assert sorted(path.name for path in Path("swept").iterdir() if path.is_dir()) == [
        "job0",
        "job1",
    ]
    assert Notes.events == ["mine start", "seed=1", "seed=2", "end"]


def test_a_file_has_what_hydra_reads_of_a_sweep() -> None:
    Notes.events.clear()
    Path("my.yaml").write_text(
        f"""
defaults: [override hydra/launcher: basic]
hydra:
  sweeper: {{params: {{seed: "1,2", max_new_tokens: 3, temperature: 0.5}}}}
  sweep: {{dir: swept, subdir: "job${{hydra.job.num}}"}}
  launcher: {{none_such: 1}}
  callbacks: {{mine: {{_target_: {Notes.__module__}.{Notes.__qualname__}, prefix: yours}}}}
"""
    )
    basic = "hydra/launcher=basic"  # the file's keys of another one are left out
    code, jobs, _ = sweep("--config", "my.yaml", "temperature=1", basic)
    assert code == 0
    # What is typed goes over it, as max_new_tokens=2 of TINY.
    seen = [(job["seed"], job["max_new_tokens"], job["temperature"]) for job in jobs.seen]
    assert seen == [("1", "2", "1"), ("2", "2", "1")]
    assert {path.name for path in Path("swept").iterdir()} >= {"job0", "job1"}
    assert Notes.events[0] == "yours start"
    words = ["hydra.sweep.dir=other", "hydra/sweeper=basic", basic]
    code, jobs, _ = sweep("--config", "my.yaml", *words)
    assert [job["seed"] for job in jobs.seen] == ["1", "2"] and Path("other/job1").is_dir()


@pytest.mark.parametrize(
    "word",
    [
        "hydra.sweeper.params={seed:'1,2'}",
        "hydra.sweeper.params.seed=1,2",
        "+hydra.sweeper.params.seed='1,2'",
    ],
)
def test_params_of_the_sweeper_are_typed(word: str) -> None:
    assert [job["seed"] for job in sweep(word)[1].seen] == ["1", "2"]


def test_a_folder_of_options_has_launchers_and_sweeps() -> None:
    for name, text in {
        "hydra/launcher/mine": "defaults: [basic]",
        "experiment/quick": "# @package _global_\nhydra: {sweeper: {params: {seed: '5,6'}}}",
    }.items():
        path = Path("conf", f"{name}.yaml")
        path.parent.mkdir(parents=True)
        path.write_text(text)
    words = ["--config-dir", "conf", "+experiment=quick", "hydra/launcher=mine"]
    assert [job["seed"] for job in sweep(*words)[1].seen] == ["5", "6"]
    with pytest.raises(ConfigError, match=r"^experiment=quick: experiment is a group of yours"):
        sweep("--config-dir", "conf", "experiment=quick")  # once, not of each job


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("callbacks: {a: {_target_: os.system}}", "os.system is not one of Hydra's callbacks"),
        ("callbacks: {a: {_target_: no_such.Module}}", "hydra.callbacks.a: .*no_such"),
        ("callbacks: {a: {_target_: x.Y, b: [{_target_: os.system}]}}", "expected one _target_"),
        ("launcher: {_target_: os.system}", "_target_ is not taken from a file"),
        ("launcher: {setup: [rm]}", "hydra.launcher.setup: lists and sections"),
        ("sweeper: {none: 1}", "'none' not in"),
        ("sweep: 3", "hydra.sweep: got 3, expected a section"),
    ],
)
def test_a_file_runs_no_code(text: str, expected: str) -> None:
    Path("my.yaml").write_text(f"hydra: {{{text}}}")
    with pytest.raises(ConfigError, match=expected):
        sweep("--config", "my.yaml")


def test_a_dry_run_leaves_nothing() -> None:
    assert sweep("seed=1,2", "dry_run=true")[0] == 0
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("words", "error", "expected"),
    [
        (
            ["hydra/launcher=none_such"],
            EnvironmentFault,
            "hydra/launcher=none_such: no such plugin",
        ),
        (["hydra/sweeper=none_such"], EnvironmentFault, "hydra/sweeper=none_such: no such plugin"),
        (["hydra.launcher.n=1"], ConfigError, "'n' not in 'BasicLauncherConf'"),
        (["seed=interval(0,1)", "hydra/sweeper=basic"], ConfigError, "does not support sweep type"),
        (
            ["seed=1,2", "sweep_metric=wrong"],
            ConfigError,
            "expected one of timing.decode_tok_s, generated",
        ),
    ],
)
def test_unsupported_settings_are_reported(
    words: list[str], error: type[RunnerError], expected: str
) -> None:
    with pytest.raises(error, match=expected):
        sweep(*words)


SLURM = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node, this machine, for the length of a test: what its programs read."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    folder.mkdir()
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    config = folder / "slurm.conf"
    config.write_text(SLURM.format(host=host, user=user, folder=folder, ports=ports))
    environment = {"SLURM_CONF": str(config)}
    with ExitStack() as daemons:
        for name in ("slurmctld", "slurmd"):
            log = daemons.enter_context((folder / f"{name}.log").open("wb"))
            daemon = subprocess.Popen(
                [name, "-D"], env={**os.environ, **environment}, stdout=log, stderr=log
            )
            daemons.callback(daemon.wait)
            daemons.callback(daemon.terminate)
        yield environment


@pytest.mark.skipif(not PYTHON.exists(), reason="no launchers of Hydra's: make cluster")
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local", "submitit_slurm"])
def test_launchers_run_the_jobs_in_processes_of_their_own(launcher: str, tmp_path: Path) -> None:
    if launcher != "submitit_slurm":
        launched(PYTHON, launcher)
        return
    if not all(map(shutil.which, ("slurmctld", "slurmd", "sbatch"))):
        pytest.skip("no Slurm: apt install slurm-wlm")
    with slurm(tmp_path / "slurm") as environment:
        launched(PYTHON, launcher, **environment)
        ran = (tmp_path / "slurm/slurmd.log").read_text()
        assert ran.count("Launching batch job") == 2, ran


def test_jobs_run_on_a_ray_of_this_machine(ray_python: Path) -> None:
    # Ray's sockets are below it, and their paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        words = ("+hydra.launcher.ray.init.include_dashboard=false",)
        own = {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        output = launched(ray_python, "ray", *words, **own, **token)
    assert "Started a local Ray instance" in output and "(_run_job pid=" in output


def launched(python: Path, launcher: str, *words: str, **environment: str) -> str:
    """The output of a sweep of two jobs."""
    words = (*TINY, "seed=1,2", "-m", f"hydra/launcher={launcher}", *words)
    done = subprocess.run(
        [python, ROOT / "run_lite.py", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    jobs = [json.loads(path.read_text()) for path in Path("outputs").rglob("job.json")]
    runs = {job["run"] for job in jobs}
    assert len(runs) == 2 and all((Path(run) / "result.json").is_file() for run in runs)
    assert {tuple(job["overrides"]) for job in jobs} == {("seed=1",), ("seed=2",)}
    return done.stderr
