"""TransformerOpParallelConfig: how ranks share a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lite_runner.config.fields import Fault, read
from lite_runner.config.mindformers_keys import IGNORED
from lite_runner.config.sections import ParallelConfig
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ConfigError


class TransformerOpParallelConfig(ParallelConfig):
    """How ranks share a model: `data_parallel` replicas, each sharded over `model_parallel` ranks.

    As in MindFormers the embedding and the head are whole on every rank, unless vocab_emb_dp=False.
    Settings of training change nothing.
    """

    def __init__(self, **settings: Any) -> None:
        """Raises ConfigError for unknown settings and invalid values."""
        known = {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "vocab_emb_dp": True}
        faults: list[Fault] = []
        for name in settings:
            if name not in known and f"parallel_config.{name}" not in IGNORED:
                near = did_you_mean(nearest(name, known))
                faults.append(Fault((name,), f"parallel_config.{name}: no such setting{near}"))
        given = {name: settings.get(name, default) for name, default in known.items()}
        read(given, ParallelConfig, "parallel_config", faults)
        if faults:
            raise ConfigError.of([fault.text for fault in faults])
        super().__init__(**given)


def parallel_settings(given: Any) -> dict[str, Any]:
    """A run's section `parallel_config` from a script's object or dict. Raises ConfigError."""
    if isinstance(given, Mapping):
        given = TransformerOpParallelConfig(**given)
    if not isinstance(given, ParallelConfig):
        raise ConfigError(
            f"parallel_config: got {given!r}, expected a TransformerOpParallelConfig or a dict"
        )
    return asdict(given)
