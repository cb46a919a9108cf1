"""Ctrl-C and SIGTERM in a program that embeds lite_runner: as if MindSpore were not there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.paths import ROOT

EMBEDDING = """
import os, signal, sys, threading, time
from lite_runner import AutoModel

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell put behind
kernels, scene = sys.argv[1] == "own", sys.argv[2]
model = AutoModel.from_pretrained("tiny_llama", kernels=kernels)
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
    finished = threading.Event()

    def work():
        print(model.generate([5, 6, 7], streamer=streamer, **options) == whole)
        finished.set()

    threading.Thread(target=work).start()
    print(interrupted(finished.wait))
    finished.wait()
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
