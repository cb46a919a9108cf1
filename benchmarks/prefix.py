"""Prefill of prompts that begin alike, with the prefix cache and without.

    .venv/bin/python benchmarks/prefix.py [options] [overrides, e.g. quant=a16w8]

SmolLM2-135M reads prompts of one prefix and a few tokens of their own, to the first new token of
each. One process does both in turn, with an engine of its own for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from engine import load
from numpy.typing import NDArray

from lite_runner.backends import Backend, Paged
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Finished, Request


class Reading(NamedTuple):
    """All prompts, read once."""

    seconds: float
    cached: int  # tokens that were not computed
    blocks: int  # of the KV cache, at most in use at once
    tokens: dict[int, list[int]]  # the first of each prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all begin with")
    parser.add_argument("--own", type=int, default=16, help="tokens that each ends with")
    parser.add_argument("--slots", type=int, default=32, help="prompts that are held at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="settings, e.g. quant=a16w8")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)

    backend = load(arguments.overrides, arguments.slots, arguments.prefix + arguments.own + 1)
    random = np.random.default_rng(0)

    def ids(count: int) -> NDArray[np.int32]:
        return random.integers(backend.info.vocab_size, size=count, dtype=np.int32)

    prefix = ids(arguments.prefix)
    prompts = [np.concatenate([prefix, ids(arguments.own)]) for _ in range(arguments.prompts)]
    read(backend, prompts, cache=False)
    rounds = [
        (read(backend, prompts, cache=False), read(backend, prompts, cache=True))
        for _ in range(arguments.rounds)
    ]
    without, cached = (statistics.median(pair[side].seconds for pair in rounds) for side in (0, 1))
    equal = all(one.tokens == other.tokens for one, other in rounds)
    print(
        f"{' '.join([backend.info.engine, *arguments.overrides])}: {arguments.prompts} prompts of "
        f"one prefix of {arguments.prefix} tokens and {arguments.own} of their own are read in "
        f"{without:.2f} s, with the prefix cache in {cached:.2f} s: {cached / without:.3f} of it "
        f"({rounds[0][1].cached} tokens were cached). First tokens: "
        f"{'equal' if equal else 'they differ'}. Medians of {arguments.rounds}."
    )
    if (memory := backend.info.memory) is not None:
        took, shared = (one.blocks for one in rounds[0])
        print(
            f"Up to {arguments.slots} at a time take {took} blocks of {memory.block} tokens of the"
            f" KV cache, with the prefix cache {shared}; one sequence takes"
            f" {memory.blocks_of(arguments.prefix + arguments.own)}."
        )
    backend.close()


def read(backend: Backend, prompts: Sequence[NDArray[np.int32]], *, cache: bool) -> Reading:
    """The first token of every prompt, and how long all took."""
    engine, memory, blocks = Engine(backend, prefix_cache=cache), backend.info.memory, 0
    if isinstance(backend, Paged):  # of what an engine before has left
        for slot in range(backend.info.slots):
            backend.release(slot, 0)
    one = GenerationConfig(max_new_tokens=1)
    began = time.perf_counter()
    for prompt in prompts:
        engine.add(Request(prompt, one))
    done = []
    while not engine.idle:
        done += [event for event in engine.step() if isinstance(event, Finished)]
        if memory is not None:
            blocks = max(blocks, memory.blocks - memory.free)
    seconds = time.perf_counter() - began
    return Reading(
        seconds,
        sum(one.completion.cached_tokens for one in done),
        blocks,
        {one.id: one.completion.token_ids for one in done},
    )


if __name__ == "__main__":
    main()
