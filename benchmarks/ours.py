"""One process of ours on SmolLM2; prints one line of JSON.

The same path as `run_lite.py run_mode=predict`: command line, Hydra, checkpoint, tokenizer,
backend, token loop. Only the prompts come as token ids, so that both sides compute the same.
"""

# ruff: noqa: E402
from __future__ import annotations

from lite_runner.app import start_quickly

start_quickly()  # as the program does, before the rest is imported

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from engine import opened
from measure import Measurement, engine_parser, seconds_since_start

from lite_runner import progress
from lite_runner.backends import Backend
from lite_runner.bench.cell import Prompts, lockstep
from lite_runner.config.argv import parse
from lite_runner.config.schema import GenerateOptions
from lite_runner.generation import Token
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.plan import Job
from lite_runner.run_modes import heads, resolve

NAMED = ("export.layout", "quant", "kv_cache", "model")  # settings that an engine's name shows


def loaded(config: GenerateOptions, files: ModelFiles, job: Job) -> Path:
    """The files that the backend reads: the checkpoint, or the packed ones in the cache."""
    assert files.path is not None
    if config.backend == "mslite":
        from lite_runner.backends.lite.export.opening import folder_of_run  # not for other runs

        return folder_of_run(config.graphs, files, job.slots, job.length)
    if config.backend == "native" and config.context.cache:
        from lite_runner.backends.native.packed_cache import entry_of

        return entry_of(replace(files, rounded=config.precision.rounded("CPU")))
    return files.path


def greedy(backend: Backend, prompts: Prompts, new_tokens: int) -> Iterator[list[int]]:
    """The next token of every row, new_tokens times."""
    for events in lockstep(backend, prompts, new_tokens).run():
        yield [event.token for event in events if isinstance(event, Token)]


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("overrides", nargs="*", help="more settings, e.g. backend=mslite")
    arguments = parser.parse_args()
    prompts: Prompts = arguments.prompts

    overrides = [
        "model=smollm2_135m",
        f"max_new_tokens={arguments.new_tokens}",
        f"context.threads={arguments.threads}",
        "predict_data=ids",
        "speculate=none",  # peers compute one token a step
        *arguments.overrides,
    ]
    config, _ = resolve(parse(overrides, heads()))
    progress.configure(verbosity=0)
    started = time.perf_counter()
    files = locate(config.source)
    job = Job(
        requests=[],
        tokens=prompts,
        generation=config.generation(files.model),
        slots=len(prompts),
        length=len(prompts[0]) + arguments.new_tokens,
    )
    backend, config = opened(config, files, job)
    load_s = time.perf_counter() - started - backend.compile_s
    cold = greedy(backend, prompts, arguments.new_tokens)
    next(cold)
    first_token_s = seconds_since_start()
    next(cold, None)  # compiles the step; the prefill below starts over

    settings = (setting.partition("=") for setting in arguments.overrides)
    ways = [value for key, _, value in settings if key in NAMED]
    Measurement.of(
        f"lite-runner ({', '.join([backend.info.engine, *ways])})",
        prompts,
        greedy(backend, prompts, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=[loaded(config, files, job)],
    ).print()
    backend.close()


if __name__ == "__main__":
    main()
