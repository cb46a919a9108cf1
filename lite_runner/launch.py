"""Start a run: its folder, its log, and its work in this process or in several ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lite_runner import progress
from lite_runner.config.cluster import cluster_of, starts_ranks
from lite_runner.config.fields import Note
from lite_runner.config.repeat import kept, with_input
from lite_runner.config.schema import RunConfig
from lite_runner.config.seeds import with_seed
from lite_runner.distributed.rank_table_checks import with_rank_table
from lite_runner.distributed.rank_table_file import read_rank_table
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.run_modes import from_dict, run_mode
from lite_runner.system import environment
from lite_runner.system.versions import versions

LEAVE_S = 20.0  # until ranks that are done are ended
RANK_PROGRAM = Path(__file__).with_name("rank.py")


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
            _launch_ranks(config, folder, plugins)
        else:
            folder.write_config(kept(config.without_secrets()))
            mode.run(mode.plan(config), folder)
    return 0


def log_details(notes: Sequence[Note]) -> None:
    """The details of notes, for run.log and verbosity=2."""
    for note in notes:
        if note.detail:
            progress.detail(note.detail)


def _launch_ranks(config: RunConfig, folder: RunFolder, plugins: Sequence[str]) -> None:
    """Start the ranks of this machine, which read the plan from the run folder."""
    from lite_runner.distributed import ascend_ranks
    from lite_runner.distributed.job import Limits, run_ranks

    cluster, parallel = cluster_of(config), config.parallel
    on_ascend = environment.resolve_device(config.context.device_target) == "Ascend"
    table = parallel.rank_table_file if on_ascend else ""
    rank_table = read_rank_table(Path(table)) if table else None
    variables = (
        ascend_ranks.variables(cluster, rank_table, parallel.hccl_timeout) if on_ascend else {}
    )
    plan = plan_for_ranks(config)
    folder.write_config(kept(plan.config.without_secrets()))
    # Devices want to be released, and the scheduler is other machines' too; on CPU nothing is left.
    leave_s = LEAVE_S if on_ascend or cluster.local_worker_num < cluster.worker_num else 0.0
    with folder.private("plan.json", json.dumps(plan.to_dict())) as handed:
        run_ranks(
            [str(RANK_PROGRAM), str(handed), str(folder.path), *_absolute(plugins)],
            cluster,
            folder.path,
            Limits(parallel.rendezvous_timeout, parallel.timeout, leave_s),
            log_dir=Path(parallel.log_dir).expanduser().absolute() if parallel.log_dir else None,
            rank_table_file=table or "",
            ascend=variables,
        )


def _absolute(plugins: Sequence[str]) -> list[str]:
    return [str(Path(path).expanduser().absolute()) for path in plugins]


def plan_for_ranks(config: RunConfig) -> Plan:
    """The plan that ranks of this machine run, with what they read named from the root.

    To be called by one process of a machine, before its ranks read anything: what is fetched is
    fetched here, what is wrong shows before they start. Raises RunnerError.
    """
    return run_mode(config.run_mode).plan(from_dict(kept(config)))
