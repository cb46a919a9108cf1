"""One process of ours on SmolLM2; prints one line of JSON.

The same path as `run_lite.py run_mode=predict`: command line, Hydra, checkpoint, tokenizer,
backend, token loop. Only the prompts come as token ids, so that both sides compute the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from measure import Measurement, engine_parser, seconds_since_start

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.bench.lockstep import Prompts, lockstep
from lite_runner.config.argv import parse
from lite_runner.config.schema import RunConfig
from lite_runner.export.cache import folder_of_run
from lite_runner.generation import Token
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.plan.job import Job
from lite_runner.plan.loading import load
from lite_runner.run_modes import heads, resolve
from lite_runner.system import environment

NAMED = ("export.layout", "quant", "kv_cache", "model")  # settings that an engine's name shows


def loaded(config: RunConfig, files: ModelFiles, job: Job) -> Path:
    """The checkpoint, or the exported model of the cache."""
    if config.backend != "mslite":
        assert files.path is not None
        return files.path
    return folder_of_run(config, files, job.slots, job.length)


def greedy(backend: Backend, prompts: Prompts, new_tokens: int) -> Iterator[list[int]]:
    """The next token of every row, new_tokens times."""
    scheduler = lockstep(backend, prompts, new_tokens)
    while not scheduler.idle:
        yield [event.token for event in scheduler.step() if isinstance(event, Token)]


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
        *arguments.overrides,
    ]
    config, _ = resolve(parse(overrides, heads()))
    progress.configure(verbosity=0)
    started = time.perf_counter()
    files = locate(config)
    tokenizer = tokenizer_of(config, files)
    job = Job(
        requests=[],
        tokens=prompts,
        generation=config.generation(files.model),
        slots=len(prompts),
        length=len(prompts[0]) + arguments.new_tokens,
    )
    device = environment.resolve_device(config.context.device_target)
    path = loaded(config, files, job)
    backend = load(config, files, device, job, tokenizer)
    load_s = time.perf_counter() - started

    backend.prepare()
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
        files=[path],
    ).print()
    backend.close()


if __name__ == "__main__":
    main()
