"""Validation errors of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.compare_checks import KEY, pair_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.mindformers_run_checks import mindformers_model_faults, without_mindformers
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.prompts import is_file
from lite_runner.evaluation.options import EvalOptions, window_faults


def eval_faults(config: EvalOptions) -> Iterator[Fault]:
    """Validation errors of an evaluation."""
    if not config.eval_data:
        yield fault(
            "eval_data", "eval_data is empty; give a text file (no MindRecord): eval_data=TEXT.txt"
        )
    elif "\0" not in config.eval_data and not is_file(config.text_file):
        yield fault("eval_data", f"eval_data: no file {config.eval_data}")
    if config.backend == "mslite" and not (config.takes_packed or config.infer.model_dir):
        yield fault(
            ("backend", "run_mode"),
            "backend=mslite is not available with run_mode=eval: an exported graph gives the"
            " logits of the last token alone; expected engine=native, or backend=ms",
        )
    if config.adapter_path and config.runs_given_model:
        yield fault(
            ("adapter_path", "infer.model_dir"),
            "adapter_path: no adapter can be merged into an exported model; leave infer.model_dir"
            " out, or export the model with adapter_path=",
        )
    yield from offline_faults(config)
    yield from mindformers_model_faults(config)
    if (release := config.mindformers_release) is not None and not config.names_mindformers:
        yield without_mindformers(release)
    yield from adapter_faults(config, one=True)
    yield from strategy_faults(config)
    yield from _compare_faults(config)
    if (model := config.model_config()) is not None:
        yield from window_faults(config, model)


def _compare_faults(config: EvalOptions) -> Iterator[Fault]:
    """What does not score the text as well."""
    yield from pair_faults(config)
    if (other := config.compare_backend) == "mslite":
        yield fault(
            (KEY, "backend"),
            f"{KEY}=mslite: an exported graph gives the logits of the last token alone; expected"
            " backend=mslite engine=native, with the other one as compare_backend",
        )
    if other == "mindformers":
        for one in mindformers_model_faults(replace(config, backend=other)):
            yield fault((KEY, *one.keys), f"{KEY}={other}: {one.text}")
