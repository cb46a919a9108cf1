"""Ranks that share a model on the real MindFormers: what it needs, and how their workers meet.

The ranks meet on the processor, to agree and to gather results; their workers meet once more on the
device, through a scheduler of their own, and MindFormers shards the model over them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.mindformers.group import (
    WorkerGroup,
    WorkerPlace,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.process import START_SECONDS
from lite_runner.backends.mindformers.release import MindFormersRelease
from lite_runner.config import hccl
from lite_runner.config.cluster import cluster_of, ranks_of
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.plan.plan import Plan
from lite_runner.system.ascend_devices import seen_ids

KEY = "parallel_config.model_parallel"


def check_ranks(config: RunConfig, model: Decoder, device: str) -> None:
    """Raises ConfigError where MindFormers cannot share the model over the ranks of a config."""
    ranks = ranks_of(config).tensor
    if ranks == 1:
        return
    asked = f"backend=mindformers, {KEY}={ranks}"
    if device == "CPU":
        raise ConfigError(
            f"{asked}: MindFormers leaves the sharding to MindSpore's graph compiler, which does it"
            " on devices alone (on a processor it says: Invalid communication backend: CPU)",
            "backend=ms shares a model on processors, too",
        )
    cluster = cluster_of(config)
    if cluster.local_worker_num < cluster.worker_num:
        raise ConfigError(
            f"{asked}: the ranks are on {cluster.worker_num // cluster.local_worker_num} machines,"
            " expected one: MindFormers reshards the checkpoint in one folder",
            "backend=ms shares a model over machines",
        )
    if model.n_kv_heads % ranks:
        raise ConfigError(
            f"{asked}: MindFormers gives every rank key/value heads of its own, and the model has"
            f" {model.n_kv_heads}",
            f"{KEY}= a divisor of {model.n_kv_heads}, or backend=ms, whose ranks may hold the same",
        )


def join_group(
    plan: Plan,
    release: MindFormersRelease,
    python: Path,
    work: Path | None,
    resources: ExitStack,
) -> tuple[Path, WorkerPlace]:
    """The folder of the workers that share a model, and this rank's place among them; every rank
    calls it. `work` is the folder, given by the first rank when all is in it; it starts the
    scheduler, which `resources` ends. Raises EnvironmentFault."""
    from lite_runner.backends import collectives

    config, ranks = plan.config, plan.ranks
    timeout = config.parallel.rendezvous_timeout + int(START_SECONDS)  # MindFormers is imported
    scheduler = None
    mine: dict[str, int | str] = {}
    if work is not None:
        port = free_port()
        scheduler = start_scheduler(
            release.python, python, WorkerGroup(ranks.tensor, port, timeout)
        )
        resources.callback(scheduler.close)
        mine |= {"port": port, "work": str(work)}
    on_ascend = plan.device == "Ascend"
    if on_ascend:
        mine["device"] = seen_ids()[config.context.device_id]
    told = [json.loads(text) for text in collectives.gather(json.dumps(mine).encode())]
    first = told[0]
    group = WorkerGroup(
        ranks.tensor,
        first["port"],
        timeout,
        devices=[one["device"] for one in told] if on_ascend else (),
        more=hccl.timeouts(config.parallel.hccl_timeout) if on_ascend else {},
    )
    return Path(first["work"]), WorkerPlace(group, ranks.tensor_index, scheduler)
