"""Runs work in a new process of this Python, whose memory and compiler are its own.

`python -m MODULE < job.json`: a job is read from standard input, and one line of JSON is written to
standard output, `error` being why there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lite_runner.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, RunnerError
from lite_runner.system import memory
from lite_runner.system.signals import Terminated, handled

GRACE_S = 10.0  # for it to end by itself, and the processes of its engine with it
_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 300  # characters of what a process that crashed said last


def command(module: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module)


def ask(module: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `python -m module` to a job; `error` where it failed. KeyboardInterrupt ends
    the process."""
    path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    kills = memory.oom_kills()
    process = subprocess.Popen(
        command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        encoding="utf-8",
        errors="replace",
    )
    try:
        out, errors = process.communicate(json.dumps(job))
    finally:
        _end(process)
    if process.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode:
        why = memory.killed(process.returncode, kills) or errors.strip()[-_TAIL:]
        return {"error": f"its process ended with {process.returncode}: {why}".rstrip(": ")}
    answer: dict[str, Any] = json.loads(out)
    return answer


def serve(work: Callable[[Any], dict[str, Any]]) -> int:
    """Do the job of standard input; the exit code is 0 unless a signal ended it."""
    # Libraries print to standard output too, which must not mix with the JSON.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    try:
        with handled():
            answer = _answer(work, job)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Terminated:
        return EXIT_TERMINATED
    print(json.dumps(answer), file=out, flush=True)
    return 0


def _answer(work: Callable[[Any], dict[str, Any]], job: Any) -> dict[str, Any]:
    try:
        return work(job)
    except RunnerError as error:
        return {"error": str(error)}
    except Exception as error:
        lacking = memory.shortage_error(error)
        return {"error": str(lacking or f"{type(error).__name__}: {error}")}


def _end(process: subprocess.Popen[str]) -> None:
    """Let nothing of it go on that was interrupted."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
