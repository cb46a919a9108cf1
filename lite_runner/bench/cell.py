"""One cell, in a process of its own: what it loads and compiles cannot disturb another one.

    python -m lite_runner.bench.cell < job.json

A job is read from standard input, and one line of JSON is written to standard output: `measured`,
or an `error`; `again` where the process has exported its model first, which is not to be measured.
"""

from __future__ import annotations

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
from lite_runner.system import memory, own_process


def answer(job: Any) -> dict[str, Any]:
    """What the job of a cell comes to. Raises RunnerError."""
    measured = measure(CellJob.from_json(job))
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
    sys.exit(own_process.serve(answer))
