"""The load of benchmarks/serve.py: requests of one server at one rate, and what they took."""

from __future__ import annotations

import asyncio
import json
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

from lite_runner.bench.report import percentile

SHARES = (50, 95, 99)  # percentiles


@dataclass(frozen=True)
class Workload:
    """Sizes and kinds of requests."""

    prompt: int  # letters
    new: int  # tokens
    seconds: float  # of requests at each rate

    @property
    def warming(self) -> Workload:
        return replace(self, seconds=2)


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    server: str
    adapters: int  # that requests are for in turn; 0: the base model
    prefix: str  # own, or shared: half of each prompt is the same
    rate: float  # requests/s


@dataclass(frozen=True)
class Figures:
    """Of one case; times in ms, by SHARES."""

    tokens_s: float
    failed: int
    first_ms: tuple[float, ...]
    token_ms: tuple[float, ...]


@dataclass
class Answers:
    """Measurements at one rate."""

    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


def figures(found: Answers) -> Figures:
    return Figures(
        found.tokens / found.seconds,
        found.failed,
        _percentiles(found.first_s),
        _percentiles(found.next_s),
    )


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1000 * percentile(seconds, share) for share in SHARES) if seconds else ()


async def load(url: str, case: Case, work: Workload) -> Answers:
    """Send the requests of a case, and wait for all answers. They are the same for each server."""
    draw, found = random.Random(1), Answers()
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        prefix = _letters(draw, work.prompt // 2) if case.prefix == "shared" else ""
        calls: list[asyncio.Task[None]] = []
        began = time.perf_counter()
        while time.perf_counter() < began + work.seconds:
            body = {
                "prompt": prefix + _letters(draw, work.prompt - len(prefix)),
                "max_tokens": work.new,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **_model(names, case.adapters, len(calls)),
            }
            calls.append(asyncio.create_task(_one(http, body, found)))
            await asyncio.sleep(draw.expovariate(case.rate))
        await asyncio.gather(*calls)
        found.seconds = time.perf_counter() - began
    return found


def _model(names: Sequence[str], adapters: int, number: int) -> dict[str, Any]:
    """A request's fields for its model: an adapter by its name, or as llama.cpp's server has it."""
    if not adapters:
        return {"model": names[0]}
    if len(names) > 1:
        return {"model": names[1 + number % adapters]}
    return {"model": names[0], "lora": [{"id": number % adapters, "scale": 1.0}]}


async def _one(http: httpx2.AsyncClient, body: dict[str, Any], found: Answers) -> None:
    """One request; a chunk with a choice is a token, but one that tells of the end alone."""
    began = last = time.perf_counter()
    tokens = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            found.failed += 1
            return
        async for line in answer.aiter_lines():
            data = line.removeprefix("data: ")
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if usage := chunk.get("usage"):
                found.tokens += usage["completion_tokens"]
            if not chunk.get("choices") or chunk["choices"][0].get("finish_reason"):
                continue
            now = time.perf_counter()
            (found.next_s if tokens else found.first_s).append(now - (last if tokens else began))
            last, tokens = now, tokens + 1


def _letters(draw: random.Random, count: int) -> str:
    return "".join(draw.choices(f"{string.ascii_lowercase}   ", k=count))
