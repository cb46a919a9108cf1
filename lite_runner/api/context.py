"""The device and ranks of models: MindFormers' build_context and init_context.

They hold for every model made afterwards, as in MindFormers, and not for the command line.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

from lite_runner import progress
from lite_runner.backends.mindspore.device import choose_device
from lite_runner.config import Invalid, did_you_mean, hints_of, nearest, read
from lite_runner.config.mindformers import IGNORED
from lite_runner.config.prompts import with_seed as with_drawn_seed
from lite_runner.config.schema import Config, RunConfig
from lite_runner.config.sections import ASCEND_KEYS, MOST_HCCL_S, AscendSettings, Context, Ranks
from lite_runner.distributed.join import Joined, RankLock, join
from lite_runner.distributed.membership import device_of, membership
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system import environment

RENDEZVOUS_S = 120  # until all ranks must have met, where the starter does not say
_START = "start it with msrun --worker_num=N, scripts/msrun_launcher.sh or a loop over a rank table"

_joined: Joined | None = None
DEVICE_VARIABLE = "LITE_RUNNER_DEVICE_TARGET"  # takes precedence over a script

_chosen: dict[str, Any] = {}


def build_context(config: Mapping[str, Any]) -> None:
    """Take the section `context` of a config: {"context": {...}, "use_parallel": False, ...}.

    Raises as init_context.
    """
    init_context(bool(config.get("use_parallel", False)), config.get("context") or {})


def init_context(
    use_parallel: bool = False,
    context_config: ContextConfig | Mapping[str, Any] | None = None,
    parallel_config: ParallelContextConfig | Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Choose the device of the models made from now on; gives (rank, number of ranks).

    With `use_parallel` this process meets the other ranks of the job that it was started in, by
    msrun or a loop over a rank table. `parallel_config` has no effect: how a model is sharded is
    part of its own config. Raises ConfigError for a setting that does not exist, and
    EnvironmentFault where there is no such job.
    """
    given = asdict(context_config) if isinstance(context_config, ContextConfig) else context_config
    known = hints_of(Context)
    errors: list[Invalid] = []
    settings: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name in known:
            settings[name] = read(value, known[name], f"context.{name}", errors)
        elif f"context.{name}" not in IGNORED:
            near = did_you_mean(nearest(name, known))
            errors.append(Invalid((name,), f"context.{name}: no such key{near}"))
    if errors:
        raise ConfigError.of([error.text for error in errors])
    _chosen.clear()
    _chosen.update(settings)
    if not use_parallel:
        return 0, 1
    asked = AscendSettings(**{key: settings[key] for key in ASCEND_KEYS if key in settings})
    device = choose_device(chosen().get("device_target", "auto"), asked)
    if note := asked.no_effect(device):
        progress.note(note)
    rank, size = join_job(device, settings.get("device_id", 0))
    _chosen.update(rank_context(device, settings))
    return rank, size


def chosen() -> dict[str, Any]:
    """The keys of the config's section `context` that were set, or that the environment sets."""
    device = os.environ.get(DEVICE_VARIABLE)
    return {**_chosen, "device_target": device} if device else dict(_chosen)


@dataclass
class ContextConfig:
    """Settings of the device, as MindFormers names them."""

    mode: int = 0  # 0 graph
    device_target: str = "auto"  # CPU, Ascend, or auto: Ascend where there is one
    device_id: int = 0
    max_device_memory: str | None = None  # Ascend: 58GB
    ascend_config: Mapping[str, Any] | None = None  # Ascend: {"precision_mode": ...}


@dataclass
class ParallelContextConfig:
    """Settings of several cards, for use_parallel=True."""

    parallel_mode: str | int = "SEMI_AUTO_PARALLEL"
    gradients_mean: bool = False
    full_batch: bool = True


def join_job(device: str, device_id: int) -> tuple[int, int]:
    """Join the other ranks of this process's job; (rank, world size).

    Once per process; later calls return the same. The job's scheduler, which its starter runs
    as the same script, ends here when the ranks have left (SystemExit). Raises EnvironmentFault.
    """
    global _joined
    if _joined is not None:
        return _joined.rank, _joined.size
    member = membership()
    if member is None:
        raise EnvironmentFault(
            "use_parallel=True, but this process was not started as one of several ranks",
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
        from lite_runner.backends.collectives import schedule

        schedule()
        sys.exit(0)
    if device == "Ascend" and (own := device_of(member)) is not None:
        device_id = own
    _joined = join(member, device, device_id, RENDEZVOUS_S, MOST_HCCL_S)
    assert _joined.lock is not None
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
    return {"threads": environment.cores(len(_joined.local_ranks))}


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
            f" model_parallel={asked['model_parallel']} need {size} ranks, and this job has"
            f" {ranks}",
            "init_context(use_parallel=True) in as many processes"
            if _joined is None
            else f"start {size} ranks, or shard the model for {ranks}",
        )
    # A run refuses replicas without a prompt; a call does not: see `generate`.
    prompts = [*raw["predict_data"]] * asked["data_parallel"]
    return {**raw, "use_parallel": True, "auto_trans_ckpt": True, "predict_data": prompts}


def own_ranks(config: RunConfig) -> Ranks:
    """The ranks of a model, and which of them this process is."""
    ranks = config.ranks
    return replace(ranks, rank=_joined.rank) if _joined is not None and ranks.size > 1 else ranks


def manual_parallel() -> AbstractContextManager[None]:
    """Turns MindSpore's semi-auto parallel off for a while; scripts' own calls need it on."""
    if _joined is None:
        return nullcontext()
    from lite_runner.backends import collectives

    return collectives.manual_parallel()


def with_seed(config: Config) -> Config:
    """The config with a seed where it samples; where none was given, rank 0 draws it for all."""
    drawn = with_drawn_seed(config)
    if drawn is config or own_ranks(config).size == 1:
        return drawn
    from lite_runner.backends.collectives import gather

    return replace(drawn, seed=json.loads(gather(json.dumps(drawn.seed).encode())[0]))


def _end(lock: RankLock) -> None:
    """At exit: tells the others that this rank is done, unless it has failed."""
    if getattr(sys, "last_value", None) is None:  # no exception has ended it
        lock.mark_done()
    lock.stop_watching()
