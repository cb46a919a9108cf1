"""Validation errors of run modes that generate."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.ge import ge_faults
from lite_runner.config.mindformers_run_checks import mindformers_run_faults
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import GenerateOptions
from lite_runner.config.parallel import replica_faults
from lite_runner.config.prompts import prompt_faults
from lite_runner.config.requests import request_faults
from lite_runner.config.sampling_checks import sampling_faults


def generate_faults(config: GenerateOptions) -> Iterator[Fault]:
    """All validation errors of a run that generates."""
    yield from prompt_faults(config)
    yield from request_faults(config)
    yield from sampling_faults(config, config.generation(), vars(config))
    yield from adapter_faults(config, one=False)
    if config.only_save_strategy and not config.use_parallel:
        yield fault(
            ("only_save_strategy", "use_parallel"),
            "only_save_strategy=true needs use_parallel=true",
        )
    for key in ("src_strategy_path_or_dir", "auto_trans_ckpt"):
        if config.runs_given_model and (value := getattr(config, key)):
            yield fault(
                key,
                f"{key}={value if isinstance(value, str) else show(value)} has no effect"
                " with an exported model, which has its weights in it",
            )
    if not config.runs_given_model:
        yield from strategy_faults(config)
    yield from offline_faults(config)
    yield from mindformers_run_faults(config)
    yield from ge_faults(config)
    yield from replica_faults(config)
