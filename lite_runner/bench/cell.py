"""One cell, in a process of its own: what it loads and compiles cannot disturb another one.

    python -m lite_runner.bench.cell < job.json

A job is read from standard input, and one line of JSON is written to standard output: `measured`,
or an `error`; `again` where the process has exported its model first, which is not to be measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from lite_runner import progress
from lite_runner.backends.base import Backend
from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.grid import Settings
from lite_runner.bench.lockstep import timed
from lite_runner.bench.random_adapters import random_adapters
from lite_runner.bench.report import FIGURES, Measured
from lite_runner.bench.spread import Spread
from lite_runner.config.argv import parse
from lite_runner.config.compose import heads, resolve
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.schema import RunConfig
from lite_runner.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, RunnerError
from lite_runner.export import offline
from lite_runner.model import model_files
from lite_runner.model.adapters import AdapterJob
from lite_runner.model.model_files import ModelFiles
from lite_runner.plan import session
from lite_runner.plugins import register_plugins
from lite_runner.system import environment, memory
from lite_runner.system.signals import Terminated, handled


def main() -> int:
    """Do the job of standard input; the exit code is 0 unless a signal ended it."""
    # Libraries print to standard output as well: what they say is not to stand in the JSON.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = CellJob.from_json(json.load(sys.stdin))
    try:
        with handled():
            answer = _answer(job)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Terminated:
        return EXIT_TERMINATED
    print(json.dumps(answer), file=out, flush=True)
    return 0


def _answer(job: CellJob) -> dict[str, Any]:
    try:
        measured = measure(job)
    except RunnerError as error:
        return {"error": str(error)}
    except Exception as error:
        lacking = memory.fault_of(error)
        return {"error": str(lacking or f"{type(error).__name__}: {error}")}
    return {"again": True} if measured is None else {"measured": asdict(measured)}


def measure(job: CellJob) -> Measured | None:
    """Load the model and generate; None where it had to be exported first. Raises RunnerError."""
    settings = job.settings
    line = parse([*job.arguments, *settings.overrides()], heads())
    config, _ = resolve(line)
    register_plugins(line.plugins)
    progress.configure(verbosity=0)
    began = time.perf_counter()
    files = model_files.locate(config)
    work = _work(files, settings)
    config = session.with_backend(config, files, work)
    device = environment.resolve_device(config.context.device_target)
    is_exported = config.backend != "mslite" or _is_exported(config, files, work)
    tokenizer = None if is_exported else model_files.tokenizer_of(config, files)
    with closing(session.load(config, files, device, work, tokenizer)) as backend:
        if not is_exported:
            return None
        load_s = time.perf_counter() - began - backend.compile_s
        figures, load_peak = _repeated(backend, job, work)
        return Measured(
            engine=backend.info.engine,
            quant=str(files.quantization),
            load_s=load_s,
            compile_s=backend.compile_s,
            load_peak_mib=load_peak,
            figures=figures,
        )


def _work(files: ModelFiles, settings: Settings) -> session.Job:
    """Random prompts of equal length, rows with adapters in turn."""
    shape = (settings.batch, settings.prompt)
    prompts = np.random.default_rng(0).integers(files.model.vocab_size, size=shape, dtype=np.int32)
    adapters = None
    if settings.adapters:
        opened = random_adapters(files.model, settings.adapters)
        names = [opened[row % settings.adapters].name for row in range(settings.batch)]
        adapters = AdapterJob(opened, names)
    return session.Job(
        requests=(),
        tokens=prompts.tolist(),
        generation=GenerationConfig(max_new_tokens=settings.new),
        slots=settings.batch,
        length=settings.length,
        adapters=adapters,
    )


def _is_exported(config: RunConfig, files: ModelFiles, work: session.Job) -> bool:
    if files.given is not None:
        return True
    want = offline.wanted_of_run(config, files, work.slots, work.length)
    return offline.folder_in_cache(files, config, want).is_dir()


def _repeated(backend: Backend, job: CellJob, work: session.Job) -> tuple[dict[str, Spread], float]:
    """The figures over repetitions, and what loading and warm-up took at most, in MiB."""
    names = None if work.adapters is None else work.adapters.of_prompts
    backend.prepare()
    for _ in range(job.warmup):
        timed(backend, work.tokens, job.settings.new, names)
    load_peak = memory.peak() / 2**20
    runs = []
    for _ in range(job.repeat):
        memory.forget_peak()
        found = timed(backend, work.tokens, job.settings.new, names)
        runs.append({**found.figures, "peak_mib": memory.peak() / 2**20})
    return {key: Spread.of([run[key] for run in runs]) for key in FIGURES}, load_peak


if __name__ == "__main__":
    sys.exit(main())
