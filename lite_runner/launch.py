"""Start a run: its folder, its log, and its work in this process or in several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from lite_runner import progress
from lite_runner.config.cluster import starts_ranks
from lite_runner.config.fields import Note
from lite_runner.config.repeat import kept, with_input
from lite_runner.config.schema import RunConfig
from lite_runner.config.seeds import with_seed
from lite_runner.distributed.rank_table_checks import with_rank_table
from lite_runner.output.report import RunFolder
from lite_runner.run_modes import run_mode
from lite_runner.system import environment
from lite_runner.system.versions import versions


def launch(config: RunConfig, notes: Sequence[Note] = (), plugins: Sequence[str] = ()) -> int:
    """Run `config` and return the exit code. Raises RunnerError, which the caller shows."""
    progress.configure(config.verbosity)
    for note in notes:
        progress.note(f"note: {note.text}")
    config, mode = with_rank_table(config), run_mode(config.run_mode)
    if config.dry_run:
        log_details(notes)
        progress.text(mode.plan(config).text())
        return 0
    if not config.leaves_folder:
        mode.run(mode.plan(config), None)
        return 0
    environment.check_packages()
    if config.computes_here:
        # Before anything is fetched: a yaml made for other machines needs an override.
        environment.resolve_device(config.context.device_target, several=config.use_parallel)
    config = with_input(config)
    if config.parallel.node_rank == 0:  # other machines get the seed of rank 0
        config = with_seed(config)
    with RunFolder.create(config.output_dir, config.run_mode, config.model_name) as folder:
        folder.open_log()
        progress.detail(", ".join(f"{name} {version}" for name, version in versions().items()))
        log_details(notes)
        if starts_ranks(config):
            from lite_runner.launch_ranks import launch_ranks

            launch_ranks(config, folder, plugins)
        else:
            folder.write_config(kept(config.without_secrets()))
            mode.run(mode.plan(config), folder)
    return 0


def log_details(notes: Sequence[Note]) -> None:
    """The details of notes, for run.log and verbosity=2."""
    for note in notes:
        if note.detail:
            progress.detail(note.detail)
