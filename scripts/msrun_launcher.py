"""The part of msrun_launcher.sh that parses the command: no shell expands it.

    python msrun_launcher.py COMMAND WORKER_NUM JOIN LOG_DIR [SETTING ...]

COMMAND is split into words with quotes obeyed and nothing expanded. The settings go in front of its
own, which win. The job is run_lite.py's or run_mindformer.py's, or msrun's for another Python
script, whose `import mindformers` means lite_runner; this only becomes that process, or
(JOIN False) starts it.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lite_runner.errors import RunnerError
from lite_runner.mindformers.__main__ import MODULE, RUN_MINDFORMER, find, parser

ROOT = Path(__file__).resolve().parent.parent
# The words of a command that say how it is cut; without one, all workers share a model, or are
# replicas of one that is trained, unless the yaml of the training says it.
_SAYS_RANKS = re.compile(r"(--)?parallel(_config\.\w+)?(=|$)")
_CONFIG = re.compile(r"--config[= ](\S+)")
_RUN_MODE = re.compile(r"(?:^| )(?:--)?run_mode *[=: ] *['\"]?(\w+)", re.MULTILINE)


def words_of(command: str, workers: int, log_dir: str, settings: list[str]) -> list[str]:
    """The words to run. Raises ValueError or RunnerError for a command that cannot be run on
    `workers` cards."""
    words = shlex.split(command)
    if not words:
        raise ValueError("it is empty")
    if words[0].endswith(".py"):  # MindFormers' commands may leave out the interpreter
        words.insert(0, sys.executable)
    elif words[0] in ("python", "python3"):  # this one, which has what the project needs
        words[0] = sys.executable
    if words[:3] == [sys.executable, "-m", MODULE]:
        del words[1:3]
    elif words[0] != sys.executable or not words[1:] or not words[1].endswith(".py"):
        if workers > 1:
            raise ValueError("more than one worker needs run_lite.py or another Python script")
        return words
    flags = parser().parse_args(words[1:])
    device = ["--device_target", flags.device_target] if flags.device_target else []
    name = Path(flags.script).name
    if name in RUN_MINDFORMER or name == "run_lite.py":
        program = ROOT / ("run_lite.py" if name == "run_lite.py" else "run_mindformer.py")
        own = [*device, *flags.arguments]
        return [sys.executable, str(program), *_ranks(own, workers, log_dir, settings), *own]
    find(flags.script)
    script = ["-m", MODULE, *device, flags.script, *flags.arguments]
    if workers == 1:
        return [sys.executable, *script]
    return [*_msrun(workers, log_dir, settings), "python", *script]


def _ranks(own: list[str], workers: int, log_dir: str, settings: list[str]) -> list[str]:
    """The settings of a job of ours on `workers` cards, in front of its `own`."""
    ours = []
    if not any(_SAYS_RANKS.match(word) for word in own):
        named = _CONFIG.search(" ".join(own))
        file = Path(named[1]) if named else None
        yaml = file.read_text("utf-8", "replace") if file and file.is_file() else ""
        mode = _RUN_MODE.search(" ".join(own)) or _RUN_MODE.search(yaml)
        if mode is None or mode[1] not in ("finetune", "train"):
            ours += ["parallel_config.data_parallel=1", f"parallel_config.model_parallel={workers}"]
        elif "\nparallel_config:" not in yaml:
            ours += [f"parallel_config.data_parallel={workers}", "parallel_config.model_parallel=1"]
    if workers > 1:
        ours += ["use_parallel=true", f"parallel.worker_num={workers}", *settings]
        ours += [f"parallel.log_dir={log_dir}"] if log_dir else []
    return ours


def _msrun(workers: int, log_dir: str, settings: list[str]) -> list[str]:
    """The words that start a Python script, which joins by itself, on several cards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"worker_num": str(workers), "local_worker_num": str(workers), "join": "True"}
    options |= {"log_dir": log_dir or "output/msrun_log", "master_port": str(port)}
    for setting in settings:
        name, _, value = setting.removeprefix("parallel.").partition("=")
        options["cluster_time_out" if name == "rendezvous_timeout" else name] = value
    msrun = Path(sys.executable).with_name("msrun")  # which takes the `python` on PATH
    os.environ["PATH"] = os.pathsep.join([str(msrun.parent), os.environ.get("PATH", "")])
    return [sys.executable, str(msrun), *(f"--{name}={value}" for name, value in options.items())]


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
    except (OSError, RunnerError, ValueError) as error:
        print(f"error: the command {command!r} cannot be run: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
