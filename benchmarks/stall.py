"""Waiting times for the next token while a long prompt of another request is read.

    .venv/bin/python benchmarks/stall.py [options] [overrides, e.g. quant=a16w8]

SmolLM2-135M answers several requests when a long prompt arrives. A gap is the time between two
tokens of one request; those count as "while it is read" that lie between its arrival and its first
token, in whole or in part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from engine import load

from lite_runner.backends import Backend
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Request, Token

SHORT = 64  # tokens of the prompts that are being answered


@dataclass(frozen=True)
class Gaps:
    """One round; all in seconds."""

    before: list[float]  # of all requests, before the long prompt arrives
    during: list[float]  # while it is read
    first_token: float  # of the long prompt, from its arrival
    steps: int  # that read it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=8, help="that are being answered")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of the one that arrives")
    parser.add_argument("--token-budget", type=int, help="of a step (default: the backend's)")
    parser.add_argument("--steps", type=int, default=32, help="before it arrives")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="settings, e.g. quant=a16w8")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)

    length = SHORT + arguments.steps + arguments.prompt_tokens
    backend = load(arguments.overrides, arguments.requests + 1, length)
    rounds = [one_round(backend, arguments) for _ in range(arguments.rounds + 1)][1:]
    first = statistics.median(one.first_token for one in rounds)
    print(
        f"{' '.join([backend.info.engine, *arguments.overrides])}: {arguments.requests} requests "
        f"are answered, a prompt of {arguments.prompt_tokens} tokens arrives\n\n"
        "| | median gap, ms | longest gap, ms |\n|---|---|---|\n"
        f"| before it arrives | {cells([one.before for one in rounds])} |\n"
        f"| while it is read | {cells([one.during for one in rounds])} |\n\n"
        f"Its first token comes after {first:.2f} s, in {rounds[0].steps} steps. "
        f"Medians of {arguments.rounds} rounds.\n"
    )
    backend.close()


def one_round(backend: Backend, arguments: argparse.Namespace) -> Gaps:
    """Answer the short prompts, then the long one beside them, until its first token."""
    engine = Engine(backend, arguments.token_budget, prefix_cache=False)
    random = np.random.default_rng(0)

    def request(tokens: int) -> Request:
        prompt = random.integers(backend.info.vocab_size, size=tokens, dtype=np.int32)
        return Request(prompt, GenerationConfig())  # as long as there is room

    times: dict[int, list[float]] = {}  # when each request's tokens came

    def step() -> None:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Token):
                times[event.id].append(now)

    def add(tokens: int) -> int:
        number = engine.add(request(tokens))
        times[number] = []
        return number

    answered = [add(SHORT) for _ in range(arguments.requests)]
    while any(len(times[one]) <= arguments.steps for one in answered):
        step()
    arrival = time.perf_counter()
    long = add(arguments.prompt_tokens)
    steps = 0
    while not times[long]:
        step()
        steps += 1
    first = times[long][0]
    step()  # ends the gaps in which the first token came

    before, during = [], []
    for one in answered:
        for start, end in zip(times[one], times[one][1:], strict=False):
            if end <= arrival:
                before.append(end - start)
            elif start < first:
                during.append(end - start)
    for number in times:
        engine.finish(number, "interrupted")
    return Gaps(before, during, first - arrival, steps)


def cells(rounds: Sequence[Sequence[float]]) -> str:
    """The median and the longest of each round's gaps, and of each the rounds' median."""
    figures = (statistics.median(figure(gaps) for gaps in rounds) for figure in (np.median, max))
    return " | ".join(f"{1e3 * seconds:.1f}" for seconds in figures)


if __name__ == "__main__":
    main()
