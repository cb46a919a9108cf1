"""The process of one cell: loads the model, computes random prompts with random adapters, and
times the steps, apart from all other cells.

    python -m lite_runner.bench.cell < job.json

A job is read from standard input, and one line of JSON is written to standard output: `measured`
and the `backend` that computed, with profile=true also a `profile` and its `table`; or an `error`;
`again` where the process has exported its model first, which is not to be measured.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner import plugins, profiler, progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend, seat
from lite_runner.backends.lite.export.opening import folder_of_run
from lite_runner.bench.options import CellJob, CellOptions, CellSettings
from lite_runner.bench.report import FIGURES, Measured, Spread, percentile
from lite_runner.config import raise_errors
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation import Engine, Request
from lite_runner.model.adapters import AdapterJob
from lite_runner.model.locate import locate, tokenizer_of
from lite_runner.native import costs
from lite_runner.plan import Job
from lite_runner.plan.resources import choose, open_backend, run_options
from lite_runner.records import dataclass
from lite_runner.system import environment, memory, own_process
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import Adapter, LoraPair, sites

RANK = 8
Prompts = Sequence[Sequence[int]] | NDArray[np.int32]


def workload(model: Decoder, settings: CellSettings) -> Job:
    """The same prompts and adapters each time."""
    shape = (settings.batch, settings.prompt)
    prompts = np.random.default_rng(0).integers(model.vocab_size, size=shape, dtype=np.int32)
    if model.prefix is not None:  # with less the scheduler takes none
        prompts[:, -2:] = model.prefix.mask_token_ids[0], model.prefix.end_token_id
    adapters = None
    if settings.adapters:
        opened = random_adapters(model, settings.adapters)
        names = [opened[row % settings.adapters].name for row in range(settings.batch)]
        adapters = AdapterJob(opened, names)
    return Job(
        requests=(),
        tokens=prompts.tolist(),
        generation=GenerationConfig(max_new_tokens=settings.new),
        slots=settings.batch,
        length=settings.length,
        adapters=adapters,
    )


def random_adapters(model: Decoder, count: int, rank: int = RANK) -> Sequence[Adapter]:
    """Adapters a0, a1, ... of every linear layer of the blocks, with values that are drawn when
    they are read, the same ones each time."""
    return [_adapter(model, f"a{number}", rank) for number in range(count)]


def _adapter(model: Decoder, name: str, rank: int) -> Adapter:
    pairs = {}
    for site in sites(model):
        if site.is_embedding or site.weight == "lm_head.weight":
            continue
        key = f"{name}/{site.weight}"
        a = _tensor((rank, site.width_in), 1 / site.width_in**0.5, f"{key}/a")
        b = _tensor((site.width_out, rank), 0.1 / rank**0.5, f"{key}/b")
        pairs[site.weight] = LoraPair(a, b, scale=1.0)
    return Adapter(name, Path(name), pairs)


def _tensor(shape: tuple[int, int], deviation: float, key: str) -> LazyTensor:
    return LazyTensor(shape, "F32", partial(_draw, shape, deviation, zlib.crc32(key.encode())))


def _draw(shape: tuple[int, int], deviation: float, seed: int) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * np.float32(deviation)


def lockstep(
    backend: Backend,
    prompts: Prompts,
    new_tokens: int,
    adapters: Iterable[str | None] | None = None,
) -> Engine:
    """An engine whose first step reads all prompts; `new_tokens` steps in all give each row a
    token, for no end token stops it. `adapters` has one for each prompt; none: the base model."""
    info = backend.info
    budget = max(sum(map(len, prompts)), info.slots - 1 + info.chunk)
    engine = Engine(backend, budget, prefix_cache=False)
    options = GenerationConfig(max_new_tokens=new_tokens)
    for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True):
        engine.add(Request(np.array(prompt, np.int32), options, adapter))
    return engine


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
    engine = lockstep(backend, prompts, new_tokens, adapters)
    steps = []
    for _ in engine.run():
        now, compiled_now = time.perf_counter(), backend.compile_s
        steps.append(now - began - (compiled_now - compiled))
        began, compiled = now, compiled_now
    return Timed(len(prompts), sum(map(len, prompts)), steps)


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
    """The figures over repetitions, and the peak memory of loading and warm-up, in MiB."""
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
    """A backend, and its job."""

    backend: Backend
    choice: str  # its name, with the reason
    work: Job
    quant: str  # the type of the weights
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
