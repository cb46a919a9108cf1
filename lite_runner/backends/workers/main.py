"""The program of a worker process: stand-alone, Python 3.7 and its standard library.

    python -I -B main.py SCRIPT

SCRIPT defines `WORKER(tell)`, with a method for each operation: {"op": "load", "path": ...} calls
load(path=...), which returns the answer. Its client is process.py. Requests come on stdin, answers
go to the original stdout; both are framed JSON: a length (4 bytes, little endian) and that many
bytes. An answer is {"answer": {...}} or {"error": "..."}; before it there may be any number of
{"event": {...}}, which `tell` sends. {"op": "ping"} is answered here.

The process exits at the end of stdin, and with its parent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import struct
import sys
from typing import Any, BinaryIO, Dict

PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("<I")

Message = Dict[str, Any]


def read(stream: BinaryIO) -> Message:
    """The next request. Raises EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    body = stream.read(LENGTH.unpack(head)[0])
    request: Message = json.loads(body.decode("utf-8"))
    return request


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location("worker_script", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(error: BaseException) -> str:
    """The message of an error, with the first line of what it was raised from or while
    handling: a library may hide the reason behind a general notice."""
    text = str(error) or type(error).__name__
    context = None if error.__suppress_context__ else error.__context__
    reason = str(error.__cause__ or context or "").strip()
    if not reason or reason in text:
        return text
    return f"{text} (from: {reason.splitlines()[0]})"


def main() -> None:
    """Answer requests until stdin ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to stdout, which would corrupt the answers

    def write(message: Message) -> None:
        body = json.dumps(message).encode("utf-8")
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()

    worker = load(sys.argv[1]).WORKER(lambda event: write({"event": event}))
    while True:
        try:
            request = read(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # skips the libraries' own cleanup, which is slow and may crash
        op = request.pop("op")
        try:
            answer: Message = {"answer": {} if op == "ping" else getattr(worker, op)(**request)}
        except Exception as error:
            answer = {"error": text_of(error)}
        write(answer)


if __name__ == "__main__":
    main()
