"""How long others wait while one client sends a server the largest bodies it can.

    .venv/bin/python benchmarks/gaps.py [--clients 8] [overrides, e.g. model=smollm2_135m]

One client asks for /health every 5 ms and another one reads a stream, both before the bodies come
and while they are answered. A gap is the time of one such answer, or between two events of the
stream. Memory is the server's resident set: before all, at its highest, and at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
BODY = 8 << 20  # bytes, less a few
PING_S = 0.005
_SETTLE_S = 1.0  # until what waited behind a body has been answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1, help="that send each body at once")
    parser.add_argument("--only", default="", help="a part of the names of the bodies to send")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds at the end, for memory")
    parser.add_argument("overrides", nargs="*", help="settings, e.g. model=smollm2_135m")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with server(given.overrides) as (process, address):
        before = memory(process)
        watch = Watch(address)
        time.sleep(3)
        report("nothing", watch, "", 0.0)
        for name, (path, body) in bodies().items():
            if given.only in name:
                watch.clear()
                began = time.perf_counter()
                found = together(given.clients, lambda p=path, b=body: send(address, p, b))
                seconds = time.perf_counter() - began
                time.sleep(_SETTLE_S)
                report(name, watch, found[0], seconds)
        watch.end()
        highest = memory(process, "VmHWM")
        time.sleep(given.rest)
        print(f"MiB: {before} before, {highest} at most, {memory(process)} at the end")


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body, by what is in it."""
    completion, chat = "/v1/completions", "/v1/chat/completions"

    def filled(head: str, item: str, tail: str, most: int = BODY) -> bytes:
        count = (most - len(head) - len(tail)) // len(item)
        return (head + item * count).rstrip(",").encode() + tail.encode()

    message = '{"role":"user","content":"x"},'
    return {
        "prompt of objects": (completion, filled('{"prompt":[', "{},", "]}")),
        "stop_token_ids": (completion, filled('{"prompt":"a","stop_token_ids":[', "11,", "]}")),
        "floats": (completion, filled('{"prompt":[', "0.5,", "]}", 4 << 20)),
        "unknown keys": (completion, unknown_keys()),
        "chat of 7 MB": (
            chat,
            filled('{"messages":[{"role":"user","content":"', "word ", '"}]}', 7 << 20),
        ),
        "200,000 messages": (
            chat,
            filled('{"messages":[', message, "]}", 200_000 * len(message)),
        ),
        "/tokenize": ("/tokenize", filled('{"prompt":"', "some words ", '"}')),
        "/tokenize of 1 MB": ("/tokenize", filled('{"prompt":"', "wörter ", '"}', 1 << 20)),
        "/detokenize": ("/detokenize", filled('{"tokens":[', "1,", "]}")),
    }


def unknown_keys() -> bytes:
    return ("{" + ",".join(f'"k{number}":1' for number in range(600_000)) + "}").encode()


def send(address: str, path: str, body: bytes) -> str:
    """Status and the beginning of the answer."""
    connection = connect(address)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return f"{answer.status} {answer.read()[:90].decode('utf-8', 'replace')}"
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def together(clients: int, work: Callable[[], str]) -> list[str]:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(work())) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Watch:
    """The longest gaps of two other clients, since they were last cleared."""

    def __init__(self, address: str) -> None:
        self._address, self._ending = address, False
        self._gaps = {"ping": 0.0, "stream": 0.0}
        self._threads = [threading.Thread(target=work) for work in (self._ping, self._stream)]
        for thread in self._threads:
            thread.start()

    def clear(self) -> None:
        self._gaps = dict.fromkeys(self._gaps, 0.0)

    @property
    def longest(self) -> dict[str, float]:
        return dict(self._gaps)

    def end(self) -> None:
        self._ending = True
        for thread in self._threads:
            thread.join()

    def _note(self, name: str, began: float) -> float:
        now = time.perf_counter()
        self._gaps[name] = max(self._gaps[name], now - began)
        return now

    def _ping(self) -> None:
        connection = connect(self._address)
        while not self._ending:
            began = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self._note("ping", began)
            time.sleep(PING_S)

    def _stream(self) -> None:
        connection = connect(self._address)
        body = {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "stream": True}
        while not self._ending:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer, last = connection.getresponse(), time.perf_counter()
            while answer.readline():
                last = self._note("stream", last)


def report(name: str, watch: Watch, answer: str, seconds: float) -> None:
    gaps = "".join(f"{gap * 1000:10.0f} ms" for gap in watch.longest.values())
    print(f"{name:20}{gaps}  {seconds:6.2f} s  {answer}", flush=True)


def connect(address: str) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    assert parts.hostname is not None
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=600)


def memory(process: subprocess.Popen[str], name: str = "VmRSS") -> int:
    """MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    found = re.search(rf"{name}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) >> 10


@contextmanager
def server(overrides: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process, and its address."""
    command = [sys.executable, ROOT / "run_lite.py", "run_mode=serve", "serve.port=0", *overrides]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving \S+ on (http://\S+)", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield process, found[1]
                return
        raise RuntimeError(f"the server ended with {process.wait()}")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


if __name__ == "__main__":
    main()
