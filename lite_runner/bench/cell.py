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

from lite_runner import progress
from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.loading import Loaded, load
from lite_runner.bench.lockstep import timed
from lite_runner.bench.report import FIGURES, Measured
from lite_runner.bench.spread import Spread
from lite_runner.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, RunnerError
from lite_runner.system import memory
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
    progress.configure(verbosity=0)
    began = time.perf_counter()
    loaded = load(job)
    with closing(loaded.backend) as backend:
        if loaded.exported:
            return None
        load_s = time.perf_counter() - began - backend.compile_s
        figures, load_peak = _repeated(loaded, job)
        return Measured(
            engine=backend.info.engine,
            quant=loaded.quant,
            load_s=load_s,
            compile_s=backend.compile_s,
            load_peak_mib=load_peak,
            figures=figures,
        )


def _repeated(loaded: Loaded, job: CellJob) -> tuple[dict[str, Spread], float]:
    """The figures over repetitions, and what loading and warm-up took at most, in MiB."""
    backend, work = loaded.backend, loaded.work
    adapters = None if work.adapters is None else work.adapters.of_prompts
    backend.prepare()
    for _ in range(job.warmup):
        timed(backend, work.tokens, job.settings.new, adapters)
    load_peak = memory.peak() / 2**20
    runs = []
    for _ in range(job.repeat):
        memory.forget_peak()
        found = timed(backend, work.tokens, job.settings.new, adapters)
        runs.append({**found.figures, "peak_mib": memory.peak() / 2**20})
    return {key: Spread.of([run[key] for run in runs]) for key in FIGURES}, load_peak


if __name__ == "__main__":
    sys.exit(main())
