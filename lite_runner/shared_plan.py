"""The plan that all ranks of a run share: resolved by one process, executed by each rank."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config.repeat import kept
from lite_runner.config.schema import RunConfig
from lite_runner.config.secret import read_keys, remember
from lite_runner.config.seeds import with_seed
from lite_runner.distributed.join import Joined
from lite_runner.distributed.stopping import STOP_FILE, StopCondition, StopFlags
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.output.report import RunFolder
from lite_runner.plan.plan import Plan
from lite_runner.run_modes import from_dict, run_mode


def plan_for_ranks(config: RunConfig) -> Plan:
    """The plan that ranks of this machine execute, with absolute paths.

    Call it in one process of a machine before its ranks read anything: files are fetched here, and
    errors show before the ranks start. Raises RunnerError.
    """
    return run_mode(config.run_mode).plan(from_dict(kept(config)))


def plan_text(plan: Plan) -> str:
    """A plan as JSON for `read_plan` in other processes of this user, with the key itself: they
    may have neither the variable nor the file that it is given by."""
    raw = plan.to_dict()
    return json.dumps({**raw, "keys": read_keys(raw["config"])})


def read_plan(file: Path) -> Plan:
    """The plan in a file of `plan_text`. Raises RunnerError."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{file}: cannot be read: {error}") from error
    if not isinstance(raw, dict) or "config" not in raw:
        raise ConfigError(f"{file}: no plan of a run")
    remember(raw.pop("keys", {}))
    return _from_dict(raw)


def share_plan(config: RunConfig, joined: Joined) -> tuple[Plan, RunFolder]:
    """The plan and the run folder that the first rank of this machine makes for all of them.

    Every rank calls it. Raises RunnerError.
    """
    from lite_runner.backends.collectives import gather

    made = {}
    if joined.leads:
        local = len(joined.local_ranks)
        parallel = dataclasses.replace(config.parallel, local_worker_num=local)
        config = dataclasses.replace(config, parallel=parallel)
        if joined.rank == 0:
            config = with_seed(config)
        plan = plan_for_ranks(config).verified(joined.local_ranks)
        folder = RunFolder.create(config.output_dir, config.run_mode, config.model_name)
        folder.write_config(kept(plan.config.without_secrets()))
        StopFlags.create(joined.lock.folder / STOP_FILE, joined.size)
        made = {"plan": plan.to_dict(), "folder": str(folder.path)}
    shared = json.loads(gather(json.dumps(made).encode())[joined.local_ranks[0]])
    return _from_dict(shared["plan"]), RunFolder(Path(shared["folder"]))


def _from_dict(raw: dict[str, Any]) -> Plan:
    config = from_dict(raw["config"])
    progress.configure(config.verbosity)
    return Plan.from_dict(raw, config)


def execute_as_rank(plan: Plan, folder: RunFolder, flags: StopFlags | None) -> None:
    """Execute the plan as the rank that its `ranks` name. Raises RunnerError, and CutShort where
    Ctrl-C ended a generation whose results have been written."""
    stop = StopCondition(flags, plan.ranks)
    run_mode(plan.config.run_mode).run(plan, folder, stop.reached)
