"""The backend of a cell, as a run with these settings loads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lite_runner import plugins
from lite_runner.backends.base import Backend
from lite_runner.bench.cell_job import CellJob
from lite_runner.bench.options import CellOptions, check_cell
from lite_runner.bench.workload import workload
from lite_runner.export.cache import folder_of_run
from lite_runner.model.locate import locate
from lite_runner.model.tokenizer import tokenizer_of
from lite_runner.plan import loading
from lite_runner.plan.backend import resolve_backend
from lite_runner.plan.job import Job
from lite_runner.records import dataclass
from lite_runner.system import environment

if TYPE_CHECKING:
    from lite_runner.model.files import ModelFiles


@dataclass(frozen=True)
class Loaded:
    """A backend, and what it is to compute."""

    backend: Backend
    work: Job
    quant: str  # how the weights are held
    exported: bool  # now: there was no exported model in the cache


def load(job: CellJob) -> Loaded:
    """Fetch and load what the cell runs, and export it where the backend wants that. Raises
    RunnerError."""
    plugins.register_plugins(job.plugins)
    config = CellOptions.from_dict(job.config)
    check_cell(config)
    files = locate(config)
    work = workload(files.model, job.settings)
    device = environment.resolve_device(config.context.device_target)
    config = resolve_backend(config, files, work, device)
    exports = not _is_there(config, files, work)
    tokenizer = tokenizer_of(config, files) if exports else None
    backend = loading.load(config, files, device, work, tokenizer)
    return Loaded(backend, work, str(files.quantization), exports)


def _is_there(config: CellOptions, files: ModelFiles, work: Job) -> bool:
    """Whether what the backend loads need not be exported first."""
    if config.backend != "mslite" or files.exported is not None:
        return True
    return folder_of_run(config, files, work.slots, work.length).is_dir()
