"""Start a run: its folder, its log, and its work in this process or in several ranks.

msrun starts the ranks with the command that repeats the run, `--config` and the config.yaml in its
folder; they join as under any msrun (joined.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lite_runner import profiler, progress
from lite_runner.backends import seat
from lite_runner.config import Note
from lite_runner.config.compose import config_yaml
from lite_runner.config.parallel import TABLE_VARIABLE
from lite_runner.config.prompts import completed
from lite_runner.config.schema import BACKENDS, ExportedOptions, RunConfig
from lite_runner.output import CONFIG, RunFolder
from lite_runner.plan.resources import check_ranks_fit
from lite_runner.run_modes import run_mode
from lite_runner.system import environment
from lite_runner.system.environment import versions
from lite_runner.system.files import memory_file

if TYPE_CHECKING:
    from lite_runner.distributed.join import Joined
    from lite_runner.profile import Process
    from lite_runner.recorder import Recorder

RANK_PROGRAM = Path(__file__).with_name("__main__.py")
TRACE = "trace.json"
OF_LAUNCHER = 200  # events of a trace that fit an environment variable


def launch(config: RunConfig, notes: Sequence[Note] = (), plugins: Sequence[str] = ()) -> int:
    """Run `config` and return the exit code. Raises RunnerError, which the caller shows."""
    for note in notes:
        progress.note(f"note: {note.text}")
    starts, mode = config.starts_ranks, run_mode(config.run_mode)
    if config.parallel.rank_table_file or TABLE_VARIABLE in os.environ:
        from lite_runner.distributed.rank_table import with_rank_table

        parallel, context = with_rank_table(
            config.parallel, config.context, on_ranks=config.on_ranks, starts=starts
        )
        config = replace(config, parallel=parallel, context=context)
    elif config.parallel.rank_table_file is None:  # a run that repeats this one has none either
        config = replace(config, parallel=replace(config.parallel, rank_table_file=""))
    if config.dry_run:
        log_details(notes)
        progress.text(mode.plan(config).text())
        return 0
    if not config.leaves_folder:
        mode.run(mode.plan(config), None)
        return 0
    environment.check_packages()
    if starts:  # ranks meet through MindSpore
        environment.check_mindspore()
    if namesake := environment.namesake():
        progress.note(f"note: {namesake}\n  -> {environment.without_namesake()}")
    if config.computes_here:
        # Before anything is fetched: a yaml made for other machines needs an override.
        environment.resolve_device(config.context.device_target, several=config.use_parallel)
    if config.profile:
        profiler.start(whole_process=True)
    # Other machines get the seed of rank 0.
    config = completed(config, draws_seed=config.parallel.node_rank == 0)
    with run_folder(config) as folder:
        folder.open_log()
        if config.profile:
            profiler.folder = folder.path
        progress.detail(", ".join(f"{name} {version}" for name, version in versions().items()))
        log_details(notes)
        with profiler.phase("plan"):
            plan = mode.plan(config)
        if starts:
            from lite_runner.distributed.job import run_of_config

            check_ranks_fit(plan)
            given = config.infer.enc_key if isinstance(config, ExportedOptions) else ""
            with _key_for_ranks(given) as words:
                words = [str(RANK_PROGRAM), "--config", str(folder.path / CONFIG), *words]
                words += [f"register_path={Path(one).expanduser().absolute()}" for one in plugins]
                run_of_config(
                    *(words, config.cluster, config.parallel, config.context.device_target),
                    *(folder.path, _recorded()),
                )
        else:
            try:
                with operators_profiled(plan.config.backend, folder.path):
                    mode.run(plan, folder)
            finally:
                _write_profile(folder)
    return 0


def run_folder(config: RunConfig) -> RunFolder:
    """The new folder of a run, with the config.yaml that repeats it."""
    text = config_yaml(config)
    return RunFolder.create(config.output_dir, config.run_mode, config.model_name, text)


def operators_profiled(backend: str, folder: Path) -> AbstractContextManager[None]:
    """The profiler of a backend's own, with profile=true; its files go to a folder."""
    if profiler.recorder is None or backend not in BACKENDS:
        return nullcontext()
    return seat(backend).profiled(folder)


def _write_profile(folder: RunFolder) -> None:
    """With profile=true, write the tables of the run to its log and result.json, and its trace."""
    profiler.folder = None
    if (recorder := profiler.stop()) is None:
        return
    process = recorder.process("run", *_rates(recorder))
    _write(folder, [process], process.profile.to_json(), process.profile.table())


def write_ranks_profile(folder: RunFolder, joined: Joined, *, in_haste: bool) -> None:
    """As `_write_profile` for a job of several ranks; all call it and the first one writes.
    `in_haste`: skip measuring this machine."""
    from lite_runner.backends.collectives import gather
    from lite_runner.profile import Process, job_profile, job_table, with_rates

    recorder = profiler.recorder
    assert recorder is not None
    gather(b"")  # so that all ranks are measured at the same time
    met = time.perf_counter()
    profiler.stop()
    rates = (0.0, 0.0) if in_haste else _rates(recorder, len(joined.local_ranks))
    own = recorder.process(f"rank {joined.rank}", *rates, met=met)
    every = gather(own.to_bytes())
    if joined.rank != 0:
        return
    processes = with_rates([Process.from_bytes(one) for one in every])
    if launcher := os.environ.get(profiler.LAUNCHER_VARIABLE):
        before = Process.from_bytes(launcher.encode())
        processes.insert(0, before.with_ranks(recorder.ended))
    _write(folder, processes, job_profile(processes), job_table(processes))


def _rates(recorder: Recorder, processes: int = 1) -> tuple[float, float]:
    """Bytes and multiply-adds per second of this machine for each of several concurrent processes;
    0 if no native layer was timed."""
    if not recorder.has_layers:
        return 0.0, 0.0
    from lite_runner.native import costs

    return costs.bandwidth(processes), costs.peak()


def _write(
    folder: RunFolder, processes: Sequence[Process], tables: Mapping[str, Any], lines: Sequence[str]
) -> None:
    from lite_runner.bench import charts
    from lite_runner.profile import trace

    folder.write_text(TRACE, trace(processes))
    measured = next((one for one in processes if one.profile.bandwidth), None)
    if measured is not None and charts.available():
        title = ", ".join([folder.path.name, measured.name][: len(processes)])
        if chart := charts.roofline_chart(measured.profile, title):
            folder.write_bytes("roofline.png", chart.png)
            folder.write_bytes("roofline.svg", chart.svg)
    if folder.result is not None:
        folder.write_result(replace(folder.result, profile=tables))
    for line in lines:
        progress.note(line)
    progress.note(f"profile: {folder.path / TRACE}, to be opened in Perfetto (ui.perfetto.dev)")


@contextmanager
def _key_for_ranks(given: str) -> Iterator[list[str]]:
    """The setting that passes the key of encrypted graphs to the ranks, through a file in memory:
    no command line, variable or file on disk holds it."""
    if not given:
        yield []
        return
    from lite_runner.system.secret import KEY, encryption_key

    key = encryption_key(given)
    assert key is not None
    with memory_file("key", key) as file:
        yield [f"{KEY}=file:{file}"]


def _recorded() -> dict[str, str]:
    """The environment variable with this launcher's record, for the rank that writes the
    profile."""
    recorder = profiler.stop()
    if recorder is None:
        return {}
    process = recorder.process("launcher").shortened(OF_LAUNCHER)
    return {profiler.LAUNCHER_VARIABLE: process.to_bytes().decode()}


def log_details(notes: Sequence[Note]) -> None:
    """The details of notes, for run.log and verbosity=2."""
    for note in notes:
        if note.detail:
            progress.detail(note.detail)
