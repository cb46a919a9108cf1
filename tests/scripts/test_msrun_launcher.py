"""scripts/msrun_launcher.sh: its reading of its arguments, and of MindFormers' commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lite_runner import AutoModel, AutoTokenizer
from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.distributed.rank_table import Device, RankTable, TableServer
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.formats.ckpt_file import write_ckpt
from lite_runner.weights.layouts import random_checkpoint
from scripts import msrun_launcher
from tests.paths import ROOT

SHOW = "run_lite.py model=tiny_llama --cfg job"


def launch(
    cwd: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The script with this Python first on PATH, as in an environment that is active."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(ROOT / "scripts/msrun_launcher.sh"), *arguments],
        cwd=cwd,
        env={**os.environ, "PATH": path, **(env or {})},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def config_of(cwd: Path, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The config that a command with --cfg job prints: the shell's part of the script is run, what
    it calls is called in this process, which saves the start of two others."""
    scripts, python = cwd / "copy/scripts", cwd / "copy/.venv/bin/python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        python.chmod(0o755)
        shutil.copytree(ROOT / "scripts", scripts, ignore=shutil.ignore_patterns("[!mo]*"))
    done = subprocess.run(
        [scripts / "msrun_launcher.sh", *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    program, command, workers, join, log_dir, *settings = done.stdout.split("\0")[:-1]
    assert program == f"{scripts}/msrun_launcher.py" and join == "True"
    words = msrun_launcher.words_of(command, int(workers), log_dir, settings)
    assert words[0] == sys.executable
    mindformer = words[1] == str(ROOT / "run_mindformer.py")
    assert mindformer or words[1] == str(ROOT / "run_lite.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(cwd)
        assert main(words[2:], mindformer=mindformer) == 0
    config = yaml.safe_load(out.getvalue())
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize(("workers", "arguments"), [(8, []), (3, ["3"])])
def test_workers_share_one_model(tmp_path: Path, workers: int, arguments: list[str]) -> None:
    config = config_of(tmp_path, SHOW, *arguments)
    done = launch(tmp_path, SHOW, *arguments)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == config
    assert config["use_parallel"] is True
    assert config["parallel"]["worker_num"] == workers
    ranks = config["parallel_config"]
    assert (ranks["data_parallel"], ranks["model_parallel"]) == (1, workers)
    assert config["parallel"]["master_port"] is None
    assert config["parallel"]["log_dir"] == ""


@pytest.mark.parametrize(
    ("words", "data", "model"),
    [
        ("parallel=dp2", 2, 1),
        ("parallel_config.data_parallel=2 parallel_config.model_parallel=1", 2, 1),
        ("--parallel_config.data_parallel 2", 2, 1),
    ],
)
def test_the_command_may_say_how_it_is_cut(
    tmp_path: Path, words: str, data: int, model: int
) -> None:
    ranks = config_of(tmp_path, f"{SHOW} {words}", "2")["parallel_config"]
    assert (ranks["data_parallel"], ranks["model_parallel"]) == (data, model)


@pytest.mark.parametrize(
    ("section", "data", "model"), [("", 2, 1), ("parallel_config: {model_parallel: 2}", 1, 2)]
)
def test_a_training_has_replicas_unless_its_yaml_says_otherwise(
    tmp_path: Path, section: str, data: int, model: int
) -> None:
    (tmp_path / "a.yaml").write_text(f"run_mode: 'finetune'\n{section}", encoding="utf-8")
    (tmp_path / "a.json").write_text('{"text": "x"}', encoding="utf-8")
    command = f"{SHOW} --config a.yaml finetune.data=a.json finetune_output=out"
    ranks = config_of(tmp_path, command, "2")["parallel_config"]
    assert (ranks["data_parallel"], ranks["model_parallel"]) == (data, model)


def test_six_arguments(tmp_path: Path) -> None:
    suffix = {"MF_LOG_SUFFIX": "a b"}
    config = config_of(tmp_path, SHOW, "2", "8118", "logs here", "True", "30", env=suffix)
    parallel = config["parallel"]
    assert (parallel["master_port"], parallel["rendezvous_timeout"]) == (8118, 30)
    assert parallel["log_dir"] == "logs here_a b"


@pytest.mark.parametrize(("local", "node_rank"), [("2", 1), ("4", 0)])
def test_nine_arguments(tmp_path: Path, local: str, node_rank: int) -> None:
    arguments = ("4", local, "10.0.0.7", "8118", "1", "logs", "True", "30")
    parallel = config_of(tmp_path, SHOW, *arguments)["parallel"]
    assert parallel == {
        **parallel,
        "worker_num": 4,
        "local_worker_num": int(local),
        "master_addr": "10.0.0.7",
        "master_port": 8118,
        "node_rank": node_rank,
        "log_dir": "logs",
        "rendezvous_timeout": 30,
    }


MODULE = "python -m lite_runner.mindformers "


@pytest.mark.parametrize("interpreter", ["", "python ", "python3 ", MODULE])
def test_commands_of_mindformers(tmp_path: Path, interpreter: str) -> None:
    command = (
        f"{interpreter}run_mindformer.py --cfg job --run_mode predict --use_parallel True "
        "model=tiny_llama --predict_data 'I love Beijing, because' \"a'b\" $HOME '$(id)' `id`"
    )
    config = config_of(tmp_path, command, "2")
    assert config["predict_data"] == ["I love Beijing, because", "a'b", "$HOME", "$(id)", "`id`"]
    assert config["use_parallel"] is True
    assert config["output_format"] == "mindformers"
    assert config["parallel"]["log_dir"] == "output/msrun_log"


@pytest.mark.usefixtures("light_msrun")
def test_a_script_imports_our_mindformers(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, sys\nfrom mindformers import AutoModel\n"
        "print(os.environ.get('RANK_ID', 0), sys.argv, AutoModel.__module__)\n"
    )
    line = "{} ['mine.py', '--a', 'b c'] lite_runner.api.auto_model"
    done = launch(tmp_path, "python mine.py --a 'b c'", "1")
    assert done.stdout == f"{line.format(0)}\n", done.stderr
    command = f"{MODULE} --device_target CPU mine.py"
    done = launch(tmp_path, f"{command} --a 'b c'", "2", "8118", "logs", "True", "30")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert line.format(rank) in (tmp_path / f"logs/worker_{rank}.log").read_text()


@pytest.mark.usefixtures("light_msrun")
def test_generate_custom_on_a_rank_table(tmp_path: Path) -> None:
    """The document's command: each rank loads its part, and all have the whole text."""
    config, _ = resolve(parse(["model=tiny_llama", "predict_data=x"], heads()))
    model = config.model_config()
    assert model is not None
    for rank in range(2):
        write_ckpt(tmp_path / f"ckpt/rank_{rank}/a.ckpt", random_checkpoint(model, seed=5))
    devices = (Device(0, "192.0.2.0"), Device(1, "192.0.2.1"))
    RankTable((TableServer("127.0.0.1", devices),)).write(tmp_path / "hccl_2p.json")
    texts = ["An increasing sequence: one,", "I love Beijing,"]
    (tmp_path / "input.txt").write_text("\n".join(texts))
    order = "python generate_custom.py --model_type tiny_llama --batch_size 2 --checkpoint_path"
    order += " ./ckpt --use_parallel True --data_parallel 2 --model_parallel 1 --max_length 40"
    done = subprocess.run(
        [ROOT / "scripts/run_dist_gen.sh", order, "hccl_2p.json", "[0,2]", "2"],
        cwd=tmp_path,
        env={**os.environ, "INPUT_DATA": "input.txt"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # MindSpore logs to the file that a rank's output goes to, at times in the middle of a line.
    stdout = re.sub(r"\[INFO\] DISTRIBUTED\(.*\n?", "", done.stdout)
    (printed,) = (line for line in stdout.splitlines() if line.startswith("['An incr"))
    alone = AutoModel.from_pretrained(
        "tiny_llama", checkpoint_name_or_path=tmp_path / "ckpt/rank_0"
    )
    tokenizer = AutoTokenizer.from_pretrained("tiny_llama")
    ids = alone.generate(tokenizer(texts)["input_ids"], max_length=40)
    assert printed == str(tokenizer.decode(ids, skip_special_tokens=True))


def test_one_worker_needs_no_ranks(tmp_path: Path) -> None:
    assert config_of(tmp_path, SHOW, "1")["use_parallel"] is False
    # What is in the command is obeyed, with one rank.
    config = config_of(tmp_path, f"{SHOW} use_parallel=true", "1")
    assert config["use_parallel"] is True
    assert config["parallel_config"]["model_parallel"] == 1


def test_one_worker_runs_any_command_as_quoted(tmp_path: Path) -> None:
    program = tmp_path / "show args.py"
    program.write_text("import sys; print(sys.argv[1:])")
    command = f"{shlex.quote(str(program))} 'I love Beijing, because' $HOME '$(id)' \"a'b\" `id`"
    done = launch(tmp_path, command, "1")
    assert done.stdout == (
        """['I love Beijing, because', '$HOME', '$(id)', "a'b", '`id`']""" + "\n"
    ), done.stderr


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (shlex.join([sys.executable, "-c", "raise SystemExit(4)"]), 4),
        ("run_lite.py model=tiny_lama", 2),
    ],
)
def test_the_exit_code_comes_through(tmp_path: Path, command: str, code: int) -> None:
    assert launch(tmp_path, command, "1").returncode == code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "got 0 arguments"),
        (["x", "2", "8118"], "got 3 arguments"),
        ([SHOW, "0"], "WORKER_NUM: got '0'"),
        ([SHOW, "2; id"], "WORKER_NUM: got '2; id'"),
        ([SHOW, "2", "8118", "logs", "maybe", "60"], "JOIN: got 'maybe'"),
        (["", "1"], "it is empty"),
        (["'unfinished", "1"], "No closing quotation"),
        (["/no/such", "1"], "No such file"),
        (["train.py", "2"], "train.py: no such file"),
        (["echo a", "2"], "more than one worker needs run_lite.py or another Python script"),
    ],
)
def test_arguments_that_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = launch(tmp_path, *arguments)
    assert done.returncode == 2
    error, *hint = done.stderr.splitlines()
    assert message in error and all(line.startswith("  -> ") for line in hint)


def test_the_projects_own_python_comes_first(tmp_path: Path) -> None:
    # A copy of the scripts beside an environment that is not on PATH.
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    own = tmp_path / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    own.write_text(f'#!/bin/sh\nOWN_PYTHON=yes exec "{sys.executable}" "$@"\n')
    own.chmod(0o755)
    (tmp_path / "show.py").write_text("import os; print(os.environ.get('OWN_PYTHON'))")

    def shown() -> str:
        command = [str(tmp_path / "scripts/msrun_launcher.sh"), "python show.py", "1"]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path}
        return subprocess.check_output(command, cwd=tmp_path, env=env, encoding="utf-8")

    assert shown() == "yes\n"
    (tmp_path / ".venv/.unfinished").touch()  # as `make run` leaves it where it was interrupted
    assert shown() == "None\n"


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_without_join_it_does_not_wait(tmp_path: Path) -> None:
    done = launch(tmp_path, f"{SHOW} seed=77", "2", "8118", "logs", "False", "30")
    assert done.returncode == 0
    assert done.stdout.endswith("what it prints is in logs/launcher.log\n")
    pid = int(done.stdout.split()[1])
    while is_running(pid):
        time.sleep(0.05)
    assert yaml.safe_load((tmp_path / "logs/launcher.log").read_text())["seed"] == 77


def test_logs_of_the_devices(tmp_path: Path) -> None:
    command = shlex.join(
        [sys.executable, "-c", "import os; print(os.environ['ASCEND_PROCESS_LOG_PATH'])"]
    )
    for name in ("PLOG_REDIRECT_TO_OUTPUT", "PLOG_REDICT_TO_OUTPUT"):
        done = launch(tmp_path, command, "1", env={name: "True"})
        assert done.stdout == f"{tmp_path}/output/plog\n", done.stderr
