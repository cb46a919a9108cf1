"""Several cards from Python: this process as one rank of a job that msrun, or a loop, has started.

Every rank runs the same script. A model is sharded as its config's `parallel_config` says; each
rank calls `generate` with the same prompts and is given the whole result.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from lite_runner.config import hccl, seeds
from lite_runner.config.cluster import ranks_of
from lite_runner.config.ranks import Ranks
from lite_runner.config.schema import Config, RunConfig
from lite_runner.distributed.join import Joined, join, schedule
from lite_runner.distributed.liveness import RankLock
from lite_runner.distributed.membership import device_of, membership
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.system import environment

RENDEZVOUS_S = 120  # until all ranks must have met, where the starter does not say
_START = "start it with msrun --worker_num=N, scripts/msrun_launcher.sh or a loop over a rank table"

_joined: Joined | None = None


def join_job(device: str, device_id: int) -> tuple[int, int]:
    """Join the other ranks of this process's job; (rank, world size).

    Once a process; later calls return the same. The job's scheduler, which its starter runs as the
    same script, ends here when the ranks have left (SystemExit). Raises EnvironmentFault.
    """
    global _joined
    if _joined is not None:
        return _joined.rank, _joined.size
    member = membership()
    if member is None:
        raise EnvironmentFault(
            "use_parallel=True, but nothing says that this process is one of several ranks",
            f"{_START}; or use_parallel=False: one card",
        )
    if member.is_machine:
        raise EnvironmentFault(f"this process was started as {member.name}, not as a rank", _START)
    environment.check_packages()
    if member.size == 1:
        if member.is_scheduler:
            sys.exit(0)
        return 0, 1
    if member.is_scheduler:
        schedule()
        sys.exit(0)
    if device == "Ascend":
        device_id = device_of(member, device_id)
    _joined = join(member, device, device_id, RENDEZVOUS_S, hccl.MOST_S)
    atexit.register(_end, _joined.lock)
    from lite_runner.backends.collectives import announce_semi_auto

    announce_semi_auto()
    return _joined.rank, _joined.size


def rank_context(device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of the config's section `context` that differ by rank: its device; or, unless `settings`
    give threads, its share of this machine's processors."""
    if _joined is None:
        return {}
    if device == "Ascend":
        return {"device_id": int(os.environ["DEVICE_ID"])}
    if settings.get("threads") is not None:
        return {}
    return {"threads": max(1, len(os.sched_getaffinity(0)) // len(_joined.local_ranks))}


def of_these_ranks(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A model's settings as those of a run on as many ranks as its parallel_config says.

    Raises ConfigError where this job has another world size.
    """
    asked = raw["parallel_config"]
    size = asked["data_parallel"] * asked["model_parallel"]
    if size == 1:  # each rank has the whole model
        return dict(raw)
    ranks = 1 if _joined is None else _joined.size
    if size != ranks:
        raise ConfigError(
            f"parallel_config: data_parallel={asked['data_parallel']} *"
            f" model_parallel={asked['model_parallel']} are {size} ranks, and this job has {ranks}",
            "init_context(use_parallel=True) in as many processes"
            if _joined is None
            else "start as many, or shard the model for as many",
        )
    # A run refuses replicas without a prompt; a call does not: see `generate`.
    prompts = [*raw["predict_data"]] * asked["data_parallel"]
    return {**raw, "use_parallel": True, "auto_trans_ckpt": True, "predict_data": prompts}


def own_ranks(config: RunConfig) -> Ranks:
    """The ranks of a model, and which of them this process is."""
    ranks = ranks_of(config)
    return replace(ranks, rank=_joined.rank) if _joined is not None and ranks.size > 1 else ranks


def manual_parallel() -> AbstractContextManager[None]:
    """Turns MindSpore's semi-auto parallel off for a while; scripts' own calls need it on."""
    if _joined is None:
        return nullcontext()
    from lite_runner.backends import collectives

    return collectives.manual_parallel()


def with_seed(config: Config) -> Config:
    """The config with a seed where it samples; where none was given, rank 0 draws it for all."""
    drawn = seeds.with_seed(config)
    if drawn is config or own_ranks(config).size == 1:
        return drawn
    from lite_runner.backends.collectives import gather

    return replace(drawn, seed=json.loads(gather(json.dumps(drawn.seed).encode())[0]))


def _end(lock: RankLock) -> None:
    """At exit: tells the others that this rank is done, unless it has failed."""
    if getattr(sys, "last_value", None) is None:  # no exception has ended it
        lock.mark_done()
    lock.stop_watching()
