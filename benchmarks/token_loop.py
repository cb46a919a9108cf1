"""Time of choosing the tokens, without a model: the logits are there at once.

    .venv/bin/python benchmarks/token_loop.py

An engine answers prompts of 128 tokens over a backend that computes nothing. Of each step the
time is taken that is not spent in the backend; its median, over the sequences, is the figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends import BackendInfo, Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Request

PROMPT = 128
SPREAD = 3.0  # standard deviation of the logits
OFFSETS = 64  # steps until the same logits come again

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
    },
}


class Prepared:
    """A `Backend` whose logits were drawn before."""

    compile_s = 0.0
    adapters = None

    def __init__(self, vocab: int, slots: int, length: int) -> None:
        self.info = BackendInfo("none", vocab, slots, length, budget=slots * PROMPT, chunk=1)
        self.spent = 0.0  # seconds in `forward`, so far
        random = np.random.default_rng(0)
        logits = random.standard_normal((slots + OFFSETS, vocab), np.float32)
        self._logits = logits * np.float32(SPREAD)
        self._step = 0

    def prepare(self) -> None:
        """Nothing to do."""

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        began = time.perf_counter()
        first = self._step % OFFSETS
        self._step += 1
        logits = self._logits[first : first + sum(row.logits for row in rows)]
        self.spent += time.perf_counter() - began
        return logits

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("| vocabulary | batch | tokens | ms a token |\n|---|---|---|---|")
    for vocab in arguments.vocabularies:
        for batch in arguments.batches:
            backend = Prepared(vocab, batch, PROMPT + arguments.new_tokens)
            for name, way in WAYS.items():
                options = GenerationConfig(max_new_tokens=arguments.new_tokens, **way)
                rounds = [a_token(backend, options) for _ in range(arguments.rounds + 1)][1:]
                figure = 1e3 * statistics.median(rounds)
                print(f"| {vocab} | {batch} | {name} | {figure:.3f} |", flush=True)


def a_token(backend: Prepared, options: GenerationConfig) -> float:
    """Seconds that a token costs: the median step's, over the sequences."""
    random = np.random.default_rng(1)
    engine = Engine(backend)
    for number in range(backend.info.slots):
        prompt = random.integers(backend.info.vocab_size, size=PROMPT, dtype=np.int32)
        engine.add(Request(prompt, options, seed_key=(0, number)))
    taken = []
    while not engine.idle:
        began, spent = time.perf_counter(), backend.spent
        engine.step()
        taken.append(time.perf_counter() - began - (backend.spent - spent))
    return statistics.median(taken) / backend.info.slots


if __name__ == "__main__":
    main()
