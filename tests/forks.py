"""Programs in processes that have MindSpore imported already: each is a fork of one that has, and
takes a second and a half of processor less than one that imports it."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.paths import ROOT

RUN_LITE = str(ROOT / "run_lite.py")
STANDARD = ("stdin", "stdout", "stderr")


class Forks:
    """`run` gives what subprocess.run would. MindSpore's threads, which a fork would lack, start
    with its device: in the fork."""

    def __init__(self, folder: Path) -> None:
        self._streams = [folder / name for name in STANDARD]
        self._streams[0].touch()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def run(
        self, *arguments: str, program: str = RUN_LITE, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """`program`, a file, in this environment, changed by `env`."""
        argv = [program, *arguments]
        asked = {
            "argv": argv,
            "cwd": str(cwd or Path.cwd()),
            "env": {**os.environ, **env},
            "streams": list(map(str, self._streams)),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, err = (path.read_text(encoding="utf-8") for path in self._streams[1:])
        return subprocess.CompletedProcess(argv, status, out, err)

    def close(self) -> None:
        self._process.communicate()  # what it reads has ended, and so does it


@contextmanager
def forks(folder: Path) -> Iterator[Forks]:
    """For a fixture: `folder` is for what the programs print."""
    started = Forks(folder)
    try:
        yield started
    finally:
        started.close()


def serve() -> None:
    """Fork for each line of standard input, and print how the fork ended."""
    for module in ("backends.mindspore.backend", "backends.lite.export.writer"):
        importlib.import_module(f"lite_runner.{module}")
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return run_as(**asked)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def run_as(argv: list[str], cwd: str, env: dict[str, str], streams: Sequence[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for handle, name in enumerate(streams):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if handle else os.O_RDONLY
        os.dup2(os.open(name, flags, 0o600), handle)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    serve()
