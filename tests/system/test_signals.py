"""Ctrl-C and SIGTERM while foreign code runs, which must neither break nor swallow them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lite_runner.system.signals import deferred
from tests.paths import ROOT


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


# In a process of its own: in this one MindSpore may have made SIGINT its own.
SENT_TO_ITSELF = """
import os, signal, sys, time
from lite_runner.system.signals import Terminated, deferred, handled

def work():
    for _ in range(20):
        time.sleep(0.01)

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]

number = int(sys.argv[1])
error = KeyboardInterrupt if number == signal.SIGINT else Terminated
before, came = handlers(), []
with handled():
    try:
        with deferred():
            os.kill(os.getpid(), number)
            try:
                work()
            except BaseException:
                came.append("too early")
    except error:
        came.append("after")
    try:  # and from then on it comes at once again
        os.kill(os.getpid(), number)
        work()
        came.append("never")
    except error:
        came.append("at once")
print(came, handlers() == before)
"""


IGNORED_BEFORE = """
import signal
from lite_runner.system.signals import deferred, handled

def ignored():
    (line,) = [one for one in open("/proc/self/status") if one.startswith("SigIgn")]
    return bool(int(line.split()[1], 16) >> signal.SIGINT - 1 & 1)

found = [ignored()]
with handled():
    with deferred():
        found.append(ignored())
    found.append(ignored())
print([*found, ignored()])
"""


def test_ctrl_c_is_never_dropped_where_a_shell_in_the_background_ignores_it() -> None:
    """The kernel drops a signal that waits when it is ignored, as it was before."""
    program = [
        sys.executable,
        "-c",
        f"import signal\nsignal.signal(2, signal.SIG_IGN){IGNORED_BEFORE}",
    ]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[True, False, False, True]"


OFFERED = """
import os, signal, time
from lite_runner.system.signals import handled, offered

answers, came = [True, False], []

def interrupt(left):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while len(answers) != left:
            time.sleep(0.01)
        came.append("taken")
    except KeyboardInterrupt:
        came.append("raised")

with handled():
    with offered(lambda: answers.pop(0)):
        interrupt(1)
        interrupt(-1)
    interrupt(-1)
print(came, answers)
"""


def test_who_is_offered_ctrl_c_may_take_it() -> None:
    command = [sys.executable, "-c", OFFERED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "['taken', 'raised', 'raised'] []\n", done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_what_cannot_be_left(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SENT_TO_ITSELF, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout == "['after', 'at once'] True\n", done.stderr


def test_an_error_is_not_hidden_by_a_signal_that_did_not_come() -> None:
    before = handlers()
    with pytest.raises(ZeroDivisionError), deferred():
        raise ZeroDivisionError
    assert handlers() == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_is_ended_while_mindspore_is_imported(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """mindspore here stands for the real one: it stops half-way and lets itself be interrupted."""
    (tmp_path / "mindspore.py").write_text(
        "import sys, time\n"
        "print('importing', flush=True)\n"
        "sys.stdin.read(1)\n"
        "try:\n"
        "    for _ in range(100): time.sleep(0.001)\n"
        "except BaseException as error:\n"
        "    raise ImportError('initialization failed') from error\n"
    )
    process = subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "run_lite.py"),
            "model=tiny_llama",
            "predict_data=hi",
            "backend=ms",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, errors = process.communicate("x", timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert errors.endswith({130: "interrupted\n", 143: "terminated\n"}[code])


EMBEDDING = """
import os, signal, sys, threading, time
from lite_runner import AutoModel

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell put behind
backend, scene = "auto" if sys.argv[1] == "own" else "ms", sys.argv[2]
model = AutoModel.from_pretrained("tiny_llama", backend=backend)
options = {"max_new_tokens": 20, "eos_token_id": []}

class Interrupting:
    "A streamer that presses Ctrl-C after a token."
    def __init__(self, number):
        self.tokens, self.number = 0, number
    def put(self, ids):
        self.tokens += 1
        if self.tokens == 4:
            os.kill(os.getpid(), self.number)
    def end(self): ...

def interrupted(work):
    try:
        work()
        for _ in range(500):
            time.sleep(0.01)
    except KeyboardInterrupt:
        return True
    return False

whole = model.generate([5, 6, 7], **options)
if scene == "term":
    os.kill(os.getpid(), signal.SIGTERM)
elif scene == "term within":
    model.generate([5, 6, 7], streamer=Interrupting(signal.SIGTERM), **options)
elif scene == "thread":
    streamer = Interrupting(signal.SIGINT)
    finished, found = threading.Event(), []

    def work():
        found.append(model.generate([5, 6, 7], streamer=streamer, **options) == whole)
        finished.set()

    threading.Thread(target=work).start()
    print(interrupted(finished.wait))
    finished.wait()
    print(*found)
else:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    print(interrupted(lambda: os.kill(os.getpid(), signal.SIGINT)))
    streamer = Interrupting(signal.SIGINT)
    print(interrupted(lambda: model.generate([5, 6, 7], streamer=streamer, **options)))
    model.generate([5, 6, 7], streamer=Interrupting(signal.SIGTERM), **options)
    print(heard == [signal.SIGTERM])
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(model.generate([5, 6, 7], **options) == whole)
"""


def run(operators: str, scene: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", EMBEDDING, operators, scene]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize("operators", ["own", "mindspore"])
def test_ctrl_c_reaches_the_caller(operators: str) -> None:
    done = run(operators, "main")
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 5), done.stderr
    assert "Exception ignored" not in done.stderr


def test_generating_in_another_thread() -> None:
    done = run("own", "thread")
    assert (done.returncode, done.stdout.split()) == (0, ["True"] * 3), done.stderr


@pytest.mark.parametrize("scene", ["term", "term within"])
def test_sigterm_ends_the_program(scene: str) -> None:
    assert run("own", scene).returncode == -signal.SIGTERM
