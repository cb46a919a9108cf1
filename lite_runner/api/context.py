"""The device and ranks of models: MindFormers' build_context and init_context.

They hold for every model made afterwards, as in MindFormers, and not for the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lite_runner.api.ranks import join_job, rank_context
from lite_runner.backends import ascend_context
from lite_runner.config.ascend import KEYS, AscendSettings
from lite_runner.config.fields import Fault, hints_of, read
from lite_runner.config.mindformers_keys import IGNORED
from lite_runner.config.sections import Context
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.system import environment

DEVICE_VARIABLE = "LITE_RUNNER_DEVICE_TARGET"  # wins over what a script says

_chosen: dict[str, Any] = {}


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
    msrun or a loop over a rank table; `parallel_config` says nothing that matters here, for how a
    model is cut is its config's. Raises ConfigError for a setting that does not exist, and
    EnvironmentFault where there is no such job.
    """
    given = asdict(context_config) if isinstance(context_config, ContextConfig) else context_config
    known = hints_of(Context)
    faults: list[Fault] = []
    settings: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if name in known:
            settings[name] = read(value, known[name], f"context.{name}", faults)
        elif f"context.{name}" not in IGNORED:
            near = did_you_mean(nearest(name, known))
            faults.append(Fault((name,), f"context.{name}: no such key{near}"))
    if faults:
        raise ConfigError.of([fault.text for fault in faults])
    _chosen.clear()
    _chosen.update(settings)
    if not use_parallel:
        return 0, 1
    device = environment.resolve_device(chosen().get("device_target", "auto"))
    asked = AscendSettings(**{key: settings[key] for key in KEYS if key in settings})
    ascend_context.choose(asked, device)
    rank, size = join_job(device, settings.get("device_id", 0))
    _chosen.update(rank_context(device, settings))
    return rank, size


def chosen() -> dict[str, Any]:
    """The keys of the config's section `context` that were set, or that the environment sets."""
    device = os.environ.get(DEVICE_VARIABLE)
    return {**_chosen, "device_target": device} if device else dict(_chosen)
