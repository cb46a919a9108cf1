"""The process of one cell: loads the model and measures it, apart from all other cells.

    python -m lite_runner.bench.cell < job.json

A job is read from standard input, and one line of JSON is written to standard output: `measured`
and the `backend` that computed, with profile=true also a `profile` and its `table`; or an `error`;
`again` where the process has exported its model first, which is not to be measured.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from lite_runner import plugins, profiler, progress
from lite_runner.backends import Backend, seat
from lite_runner.backends.lite.export.opening import folder_of_run
from lite_runner.bench.options import CellJob, CellOptions
from lite_runner.bench.report import FIGURES, Measured, Spread
from lite_runner.bench.workload import timed, workload
from lite_runner.config import raise_errors
from lite_runner.model.locate import locate, tokenizer_of
from lite_runner.native import costs
from lite_runner.plan import Job
from lite_runner.plan.resources import choose, open_backend, run_options
from lite_runner.records import dataclass
from lite_runner.system import environment, memory, own_process


def answer(job: Any) -> dict[str, Any]:
    """Load the model and generate. Raises RunnerError."""
    progress.configure(verbosity=0)
    began, cell = time.perf_counter(), CellJob.from_json(job)
    loaded = load(cell)
    with closing(loaded.backend) as backend:
        if loaded.exported:
            return {"again": True}
        load_s = time.perf_counter() - began - backend.compile_s
        recorder = profiler.start() if cell.config["profile"] else None
        figures, load_peak = _repeated(loaded, cell)
        profiler.stop()
        measured = Measured(
            engine=backend.info.engine,
            quant=loaded.quant,
            load_s=load_s,
            compile_s=backend.compile_s,
            load_peak_mib=load_peak,
            figures=figures,
        )
    found = {"measured": asdict(measured), "backend": loaded.choice}
    if recorder is None:
        return found
    rates = (costs.bandwidth(), costs.peak()) if recorder.has_layers else (0.0, 0.0)
    report = recorder.report(*rates)
    return {**found, "profile": report.to_json(), "table": report.table()}


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


@dataclass(frozen=True)
class Loaded:
    """A backend, and what it is to compute."""

    backend: Backend
    choice: str  # its name, with the reason
    work: Job
    quant: str  # how the weights are held
    exported: bool  # just now: the cache had no exported model


def load(job: CellJob) -> Loaded:
    """Fetch and load what the cell runs, and export it where the backend wants that. Raises
    RunnerError."""
    plugins.register_plugins(job.plugins)
    config = CellOptions.from_dict(job.config)
    raise_errors(list(config.cell_errors()))
    files = locate(config.source)
    work = workload(files.model, job.settings)
    device = environment.resolve_device(config.context.device_target)
    choice = choose(files, run_options(config.settings, work, device))
    config = replace(config, backend=choice.name)
    exports = (
        config.in_lite
        and files.exported is None
        and not folder_of_run(config.settings, files, work.slots, work.length).is_dir()
    )
    tokenizer = tokenizer_of(config.tokenizer, files) if exports else None
    backend = open_backend(files, run_options(config.settings, work, device, tokenizer=tokenizer))
    quant = str(seat(choice.name).quantization(files))
    return Loaded(backend, choice.note, work, quant, exports)


if __name__ == "__main__":
    sys.exit(own_process.serve(answer))
