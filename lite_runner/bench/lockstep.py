"""Batches that are read in one step and then decode together, so that both can be timed apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Backend
from lite_runner.bench.spread import percentile
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Request, Scheduler
from lite_runner.records import dataclass

Prompts = Sequence[Sequence[int]] | NDArray[np.int32]


def lockstep(
    backend: Backend,
    prompts: Prompts,
    new_tokens: int,
    adapters: Iterable[str | None] | None = None,
) -> Scheduler:
    """A scheduler whose first step reads all prompts; `new_tokens` steps in all give each row a
    token, for no end token stops it. `adapters` has one for each prompt; none: the base model."""
    info = backend.info
    budget = max(sum(map(len, prompts)), info.slots - 1 + info.chunk)
    scheduler = Scheduler(backend, budget, prefix_cache=False)
    options = GenerationConfig(max_new_tokens=new_tokens)
    for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True):
        scheduler.add(Request(np.array(prompt, np.int32), options, adapter))
    return scheduler


@dataclass(frozen=True)
class Timed:
    """The steps of one batch, in seconds without compiling."""

    rows: int
    prompt_tokens: int  # of all rows
    steps: Sequence[float]  # the first reads the prompts

    @property
    def figures(self) -> dict[str, float]:
        """By the keys of report.FIGURES, all but memory."""
        first, decode = self.steps[0], self.steps[1:]
        tokens = {
            f"token_ms_p{percent}": 1e3 * percentile(decode, percent) for percent in (50, 95, 99)
        }
        return {
            "prefill_tok_s": self.prompt_tokens / first,
            "decode_tok_s": self.rows * len(decode) / sum(decode),
            "first_token_ms": 1e3 * first,
            **tokens,
        }


def timed(
    backend: Backend,
    prompts: Prompts,
    new_tokens: int,
    adapters: Iterable[str | None] | None = None,
) -> Timed:
    """Generate `new_tokens`, at least 2, for each prompt, and time every step."""
    began, compiled = time.perf_counter(), backend.compile_s
    scheduler = lockstep(backend, prompts, new_tokens, adapters)
    steps = []
    while not scheduler.idle:
        scheduler.step()
        now, compiled_now = time.perf_counter(), backend.compile_s
        steps.append(now - began - (compiled_now - compiled))
        began, compiled = now, compiled_now
    return Timed(len(prompts), sum(map(len, prompts)), steps)
