"""Servers of OpenAI's protocol under load: tokens a second, time to the first token and per token.

    .venv/bin/python benchmarks/serve.py --gguf FILE \\
        --server "ours=python run_lite.py run_mode=serve model={gguf} serve.port={port}" \\
        --server "llama.cpp=python -m llama_cpp.server --model {gguf} --port {port}"

Requests come at random times (Poisson) at each of several rates, and all servers take turns at each
rate; only one of them works at a time. A server that does not start is left out, and named. The
prompts are random letters, half of them a prefix that all share with --shared. With --adapters N
requests are for N random adapters in turn, for servers with {adapters}, a listing, in the command.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from lite_runner.bench.random_adapters import random_adapters
from lite_runner.config.argv import parse
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.lora.adapter_write import write_adapters

START_S = 180.0
SHARES = (50, 95, 99)  # percentiles


@dataclass
class Answers:
    """What was measured at one rate."""

    tokens: int = 0
    failed: int = 0
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND")
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8], help="requests/s")
    parser.add_argument("--seconds", type=float, default=20.0, help="of requests at each rate")
    parser.add_argument("--prompt", type=int, default=256, help="letters")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--shared", action="store_true", help="half of each prompt is the same")
    parser.add_argument("--adapters", type=int, default=0)
    given = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    with ExitStack() as stack:
        urls = {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if given.adapters:
            make_adapters(given.gguf, folder, given.adapters)
        for text in given.server:
            name, _, command = text.partition("=")
            command = command.replace("{adapters}", str(folder / "lora_adapter.json"))
            if url := stack.enter_context(started(name, command, given.gguf.resolve())):
                urls[name] = url
                asyncio.run(load(url, given, rate=2, seconds=2))  # warm
        shares = " | ".join(f"p{share}" for share in SHARES)
        print(f"| server | requests/s | tokens/s | failed | first token, ms: {shares} |", end="")
        print(f" per token, ms: {shares} |\n|" + "---|" * (4 + 2 * len(SHARES)))
        for rate in given.rates:
            for name, url in urls.items():
                began = time.perf_counter()
                found = asyncio.run(load(url, given, rate=rate, seconds=given.seconds))
                speed = found.tokens / (time.perf_counter() - began)
                cells = [*percentiles(found.first_s), *percentiles(found.next_s)]
                row = [name, f"{rate:g}", f"{speed:.0f}", str(found.failed), *cells]
                print(f"| {' | '.join(row)} |", flush=True)


def make_adapters(gguf: Path, folder: Path, count: int) -> None:
    """Random adapters of rank 8 on all linear layers, and their listing."""
    config, _ = resolve(parse([f"model={gguf}", "predict_data=ids"], heads()))
    model = locate(config).model
    adapters = {one.name: one for one in random_adapters(model, count, 8)}
    write_adapters(adapters, model, folder, "peft", listed=True)


@contextmanager
def started(name: str, command: str, gguf: Path) -> Iterator[str | None]:
    """A server's address, once it answers; None where it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = shlex.split(command.replace("{gguf}", str(gguf)).replace("{port}", str(port)))
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            if answers(process, url):
                yield url
            else:
                log.seek(0)
                said = log.read().strip().splitlines()
                print(f"without {name}: {said[-1] if said else 'no answer'}", file=sys.stderr)
                yield None
        finally:
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


async def load(url: str, given: argparse.Namespace, *, rate: float, seconds: float) -> Answers:
    """Send requests for so long, and wait for all answers."""
    draw, found = random.Random(1), Answers()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        models = [card["id"] for card in listed]
        models = models[1 : 1 + given.adapters] if given.adapters else models[:1]
        prefix = letters(draw, given.prompt // 2) if given.shared else ""
        calls = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            body = {
                "model": models[len(calls) % len(models)],
                "prompt": prefix + letters(draw, given.prompt - len(prefix)),
                "max_tokens": given.new,
                "temperature": 0,
                "stream": True,
            }
            calls.append(asyncio.create_task(one(http, body, found)))
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*calls)
    return found


async def one(http: httpx2.AsyncClient, body: dict[str, Any], found: Answers) -> None:
    """One request; a chunk with choices is a token."""
    began = last = time.perf_counter()
    tokens = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            found.failed += 1
            return
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not data.startswith("{") or not json.loads(data).get("choices"):
                continue
            now = time.perf_counter()
            (found.next_s if tokens else found.first_s).append(now - (last if tokens else began))
            last, tokens = now, tokens + 1
    found.tokens += tokens


def letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices(f"{string.ascii_lowercase}   ", k=count))


def percentiles(seconds: Sequence[float]) -> list[str]:
    """In milliseconds."""
    if len(seconds) < 2:
        return ["-"] * len(SHARES)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return [f"{1000 * cuts[share - 1]:.0f}" for share in SHARES]


if __name__ == "__main__":
    main()
