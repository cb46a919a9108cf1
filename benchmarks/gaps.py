"""Waiting times of others while clients send a server the largest bodies they can.

    .venv/bin/python benchmarks/gaps.py [--clients 8] [overrides, e.g. model=smollm2_135m]

One process asks for /health every 5 ms, another one reads streams, and a third one only sleeps for
5 ms at a time. A gap is the time of one answer, between two events of a stream, and by which that
sleep was too long: what other programs on this machine cost anybody. Each row has the longest ones
from the first of its bodies to the last answer. Memory is the server's resident set: before the
bodies, at its highest, and at the end.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
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
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
BODY = 8 << 20  # bytes, less a few
PING_S = 0.005
PING_BAR_S, STREAM_BAR_S, MEMORY_BAR = 0.05, 0.25, 100  # the last one in MiB
LONG = 2000  # tokens of a long prompt
LONG_PROMPTS = 32  # at once
_SETTLE_S = 1.0  # until what waited behind a body has been answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1, help="that send each body at once")
    parser.add_argument("--only", default="", help="a part of the names of the bodies to send")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds at the end, for memory")
    parser.add_argument("overrides", nargs="*", help="settings, e.g. model=smollm2_135m")
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(f"{'':26}{''.join(f'{kind:>10}' for kind in KINDS)}")
    with server(given.overrides) as (process, address):
        with watched(address, tokens=64) as watch:
            time.sleep(5)  # the weights are read, and each slot has been used
            report("nothing", watch, "", 0.0)
            before, pings = memory(process), 0.0
            for name, (path, body) in bodies().items():
                if given.only in name:
                    found = beside(watch, name, [(path, body)] * given.clients)
                    pings = max(pings, found["ping"])
        highest = memory(process, "VmHWM")
        time.sleep(given.rest)
        after = memory(process)
        with watched(address, tokens=6000) as watch:
            time.sleep(1)
            streams = 0.0
            for name, asked in long_prompts().items():
                if given.only in name:
                    found = beside(watch, name, asked)
                    streams = max(streams, found["stream"])
    print(f"longest ping beside the bodies: {pings * 1000:.0f} ms (bar: {PING_BAR_S * 1000:.0f})")
    print(
        f"longest gap of a stream beside long prompts: {streams * 1000:.0f} ms"
        f" (bar: {STREAM_BAR_S * 1000:.0f})"
    )
    print(
        f"MiB: {before} before, {highest} at most, {after} after {given.rest:g} s (bar:"
        f" {before + MEMORY_BAR})"
    )


def beside(watch: Watch, name: str, asked: list[tuple[str, bytes]]) -> dict[str, float]:
    """The longest gaps while so many bodies are answered."""
    watch.clear()
    began = time.perf_counter()
    answer = together([lambda p=path, b=body: send(watch.address, p, b) for path, body in asked])[0]
    seconds = time.perf_counter() - began
    time.sleep(_SETTLE_S)
    return report(name, watch, answer, seconds)


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
        "text of 8 MB": (completion, filled('{"prompt":"', "some words ", '"}')),
        "text of 1 MB": (completion, filled('{"prompt":"', "wörter ", '"}', 1 << 20)),
        "250,000 token ids": (completion, filled('{"prompt":[', "11,", "]}", 750_000)),
        "1,000 texts": (
            completion,
            filled('{"prompt":[', f'"{"some words " * 500}",', "]}", 5508_000),
        ),
        "floats": (completion, filled('{"prompt":[', "0.5,", "]}", 4 << 20)),
        "unknown keys": (completion, unknown_keys()),
        "chat of 7 MB": (
            chat,
            filled('{"messages":[{"role":"user","content":"', "word ", '"}]}', 7 << 20),
        ),
        "200,000 messages": (chat, filled('{"messages":[', message, "]}", 200_000 * len(message))),
        "200,000 items": (
            "/v1/responses",
            filled('{"input":[', message, "]}", 200_000 * len(message)),
        ),
        "responses of 7 MB": ("/v1/responses", filled('{"input":"', "word ", '"}', 7 << 20)),
        "9,000 items": ("/v1/responses", filled('{"input":[', message, "]}", 9_000 * len(message))),
        "9,000 messages": (chat, filled('{"messages":[', message, "]}", 9_000 * len(message))),
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


def long_prompts() -> dict[str, list[tuple[str, bytes]]]:
    """Paths and bodies that are sent at once, by what is in them; no two share a prefix."""

    def asked(number: int, **options: int) -> tuple[str, bytes]:
        tokens = [1000 + (number * LONG + place) * 7919 % 40_000 for place in range(LONG)]
        body = {"prompt": tokens, "max_tokens": 1, **options}
        return "/v1/completions", json.dumps(body).encode()

    return {
        "a prompt's logprobs": [asked(0, prompt_logprobs=5)],
        f"{LONG_PROMPTS} long prompts": [asked(number) for number in range(1, LONG_PROMPTS + 1)],
    }


def together(work: list[Callable[[], str]]) -> list[str]:
    found: list[str] = []
    threads = [threading.Thread(target=lambda one=one: found.append(one())) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ping(address: str, tokens: int, longest: Any) -> None:
    connection = connect(address)
    while True:
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        longest.value = max(longest.value, time.perf_counter() - began)
        time.sleep(PING_S)


def stream(address: str, tokens: int, longest: Any) -> None:
    connection = connect(address)
    body = {"prompt": "a", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"Content-Type": "application/json"}
    while True:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer, last = connection.getresponse(), time.perf_counter()
        if answer.status != 200:
            print(f"the stream: {answer.read().decode()}", file=sys.stderr)
            time.sleep(0.1)
            continue
        while answer.readline():
            now = time.perf_counter()
            longest.value, last = max(longest.value, now - last), now


def sleep(address: str, tokens: int, longest: Any) -> None:
    while True:
        began = time.perf_counter()
        time.sleep(PING_S)
        longest.value = max(longest.value, time.perf_counter() - began - PING_S)


KINDS: dict[str, Callable[[str, int, Any], None]] = {"ping": ping, "stream": stream, "sleep": sleep}


class Watch:
    """The longest gaps since they were last cleared, in seconds. Each kind has a process: threads
    of this one would wait for each other."""

    def __init__(self, address: str, tokens: int) -> None:
        self.address = address
        new = multiprocessing.get_context("spawn")
        self._gaps = {kind: new.Value("d", 0.0) for kind in KINDS}
        self._processes = [
            new.Process(target=work, args=(address, tokens, self._gaps[kind]), daemon=True)
            for kind, work in KINDS.items()
        ]
        for process in self._processes:
            process.start()

    def clear(self) -> None:
        for gap in self._gaps.values():
            gap.value = 0.0

    @property
    def longest(self) -> dict[str, float]:
        return {kind: gap.value for kind, gap in self._gaps.items()}

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def watched(address: str, tokens: int) -> Iterator[Watch]:
    """`tokens` of each stream."""
    watch = Watch(address, tokens)
    try:
        yield watch
    finally:
        watch.end()


def report(name: str, watch: Watch, answer: str, seconds: float) -> dict[str, float]:
    found = watch.longest
    gaps = "".join(f"{gap * 1000:7.0f} ms" for gap in found.values())
    print(f"{name:26}{gaps}  {seconds:6.2f} s  {answer}", flush=True)
    return found


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
    command = [
        sys.executable,
        ROOT / "run_lite.py",
        "run_mode=serve",
        "serve.port=0",
        "prefix_cache=auto",
        "speculate=none",  # a token a step, so that gaps are of steps
        *overrides,
    ]
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
