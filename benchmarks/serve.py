"""Servers of OpenAI's protocol under load: tokens a second, time to the first token and per token.

    .venv/bin/python benchmarks/serve.py --gguf FILE \\
        --server "ours=python run_lite.py run_mode=serve model={gguf} serve.port={port}" \\
        --server "llama.cpp=llama-server --model {gguf} --port {port}"

Requests come at random times (Poisson) at each of several rates, and all servers take turns at each
rate; only one of them works at a time. A server that does not start is left out, and named. The
prompts are random letters, of their own or the first half the same in all. Where adapters are asked
for, requests are for random ones in turn, on servers whose command names them: {adapters}, the
listing of folders as PEFT writes them, or {ggufs}, files with commas between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx2
from serve_adapters import write_adapters
from serve_load import Case, Figures, Workload, figures, load
from serve_report import chart, tables, written_into

from lite_runner.system.signals import deferred

START_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16], help="requests/s"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests at each rate")
    parser.add_argument("--prompt", type=int, default=256, help="letters")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0], help="0: the base model")
    parser.add_argument("--prefixes", nargs="+", choices=("own", "shared"), default=["own"])
    parser.add_argument("--json", type=Path, help="keep every figure in this file")
    parser.add_argument("--page", type=Path, help="put tables and chart into this page")
    parser.add_argument("--chart", type=Path, help="draw this file as .png and .svg")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the servers
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    work = Workload(given.prompt, given.new, given.seconds)
    found = []
    for adapters in given.adapters:
        found += measured(given.server, given.gguf.resolve(), adapters, given, work)
    print(tables(found))
    if given.json:
        plain = [{**asdict(case), **asdict(each)} for case, each in found]
        given.json.write_text(json.dumps(plain, indent=1) + "\n")
    if given.chart:
        drawing = chart(found)
        given.chart.with_suffix(".png").write_bytes(drawing.png)
        given.chart.with_suffix(".svg").write_bytes(drawing.svg)
    if given.page:
        written_into(given.page, found, given.chart)


def measured(
    servers: Sequence[str], gguf: Path, adapters: int, given: argparse.Namespace, work: Workload
) -> list[tuple[Case, Figures]]:
    """The figures of all servers with so many adapters."""
    found = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        values = {"gguf": str(gguf), "threads": str(os.cpu_count())}
        if adapters:
            values |= write_adapters(gguf, folder, adapters)
        urls = {}
        for text in servers:
            name, _, command = text.partition("=")
            if bool(adapters) != ("{adapters}" in command or "{ggufs}" in command):
                continue
            if url := stack.enter_context(started(name, command, values)):
                urls[name] = url
                asyncio.run(load(url, Case(name, adapters, "own", 2), work.warming))
        for prefix in given.prefixes:
            for rate in given.rates:
                for name, url in urls.items():
                    case = Case(name, adapters, prefix, rate)
                    found.append((case, figures(asyncio.run(load(url, case, work)))))
                    print(f"{case}: {found[-1][1].tokens_s:.0f} tokens/s", file=sys.stderr)
    return found


@contextmanager
def started(name: str, command: str, values: dict[str, str]) -> Iterator[str | None]:
    """A server's address, once it answers; None where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for key, value in {**values, "port": str(port)}.items():
        command = command.replace(f"{{{key}}}", value)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = None
        try:
            try:
                with deferred():  # one that is started is known, and so is ended
                    process = subprocess.Popen(shlex.split(command), stdout=log, stderr=log)
            except OSError as error:
                print(f"without {name}: {error}", file=sys.stderr)
                yield None
                return
            if answers(process, url):
                yield url
            else:
                log.seek(0)
                said = log.read().strip().splitlines()
                print(f"without {name}: {said[-1] if said else 'no answer'}", file=sys.stderr)
                yield None
        finally:
            if process is not None:
                process.terminate()
                process.wait()


def answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait until a server answers; False: it has ended, or takes too long."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        try:
            httpx2.get(f"{url}/v1/models", timeout=5).raise_for_status()
        except httpx2.HTTPError:
            time.sleep(0.2)
        else:
            return True
    return False


if __name__ == "__main__":
    main()
