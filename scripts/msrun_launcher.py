"""The part of msrun_launcher.sh that parses the command: no shell expands it.

    python msrun_launcher.py COMMAND WORKER_NUM JOIN LOG_DIR [SETTING ...]

COMMAND is split into words with quotes obeyed and nothing expanded. The settings go in front of its
own, which win. The job is run_lite.py's, or msrun's for another Python script; this only becomes
that process, or (JOIN False) starts it.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

RUN_LITE = Path(__file__).resolve().parent.parent / "run_lite.py"
# The words of a command that say how it is cut; without one, all workers share a model.
_SAYS_RANKS = re.compile(r"(--)?parallel(_config\.\w+)?(=|$)")


def words_of(command: str, workers: int, log_dir: str, settings: list[str]) -> list[str]:
    """The words to run. Raises ValueError for a command that cannot be run on `workers` cards."""
    words = shlex.split(command)
    if not words:
        raise ValueError("it is empty")
    if words[0].endswith(".py"):  # MindFormers' commands may leave out the interpreter
        words.insert(0, sys.executable)
    elif words[0] in ("python", "python3"):  # this one, which has what the project needs
        words[0] = sys.executable
    program = Path(words[1] if len(words) > 1 else "")
    if program.name not in ("run_lite.py", "run_mindformer.py"):
        return words if workers == 1 else _msrun(words, workers, log_dir, settings)
    if program.name != RUN_LITE.name or not program.is_file():
        words[1] = str(RUN_LITE)
    ours = []
    if not any(_SAYS_RANKS.match(word) for word in words[2:]):
        ours += ["parallel_config.data_parallel=1", f"parallel_config.model_parallel={workers}"]
    if workers > 1:
        ours += ["use_parallel=true", f"parallel.worker_num={workers}", *settings]
        ours += [f"parallel.log_dir={log_dir}"] if log_dir else []
    return [*words[:2], *ours, *words[2:]]


def _msrun(words: list[str], workers: int, log_dir: str, settings: list[str]) -> list[str]:
    """The words that start a Python script, which joins by itself, on several cards."""
    script = Path(words[1]) if words[0] == sys.executable and len(words) > 1 else Path()
    if script.suffix != ".py" or not script.is_file():
        raise ValueError("more than one worker needs run_lite.py or another Python script in it")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"worker_num": str(workers), "local_worker_num": str(workers), "join": "True"}
    options |= {"log_dir": log_dir or "output/msrun_log", "master_port": str(port)}
    for setting in settings:
        name, _, value = setting.removeprefix("parallel.").partition("=")
        options["cluster_time_out" if name == "rendezvous_timeout" else name] = value
    msrun = Path(sys.executable).with_name("msrun")  # which takes the `python` on PATH
    os.environ["PATH"] = os.pathsep.join([str(msrun.parent), os.environ.get("PATH", "")])
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, str(msrun), *flags, *words[1:]]


def main() -> None:
    command, workers, join, log_dir, *settings = sys.argv[1:]
    try:
        words = words_of(command, int(workers), log_dir, settings)
        if join.lower() == "true":
            os.execvp(words[0], words)
        folder = Path(log_dir or "output/msrun_log")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "launcher.log").open("wb") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's end is not the job's
            )
        print(f"process {process.pid} runs the job; what it prints is in {folder}/launcher.log")
    except (OSError, ValueError) as error:
        print(f"error: the command {command!r} cannot be run: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
