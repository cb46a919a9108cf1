"""Validation errors of comparing two backends, and of run modes that complete prompts so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from lite_runner.config.fields import Fault, fault
from lite_runner.config.generate_checks import generate_faults
from lite_runner.config.mindformers_run_checks import mindformers_run_faults, without_mindformers
from lite_runner.config.options import CompareOptions, ExportedOptions
from lite_runner.config.predict_options import ComparedOptions, PredictOptions

KEY = "compare_backend"


def predict_faults(config: PredictOptions) -> Iterator[Fault]:
    """All validation errors of run_mode=predict."""
    yield from completion_faults(config)
    if (release := config.mindformers_release) is not None and not config.names_mindformers:
        yield without_mindformers(release)


def completion_faults(config: ComparedOptions) -> Iterator[Fault]:
    """Validation errors of completing prompts, with one backend or two."""
    yield from generate_faults(config)
    if config.compare_backend is not None:
        yield from _compare_faults(config, config.compare_backend)


def pair_faults(config: CompareOptions) -> Iterator[Fault]:
    """Two backends that are none: the same, or one without weights."""
    other = config.compare_backend
    if other is None:
        return
    if config.backend in (other, "auto"):
        yield fault(
            (KEY, "backend"),
            f"{KEY}={other}: got backend={config.backend}, expected another one by name",
        )
    given = isinstance(config, ExportedOptions) and config.runs_given_model
    if given and config.backend == "mslite" and not config.checkpoint_source:
        yield fault(
            (KEY, "load_checkpoint", "infer.model_dir"),
            f"{KEY}={other} computes with the weights that the exported model was made from;"
            " load_checkpoint= names them",
        )


def _compare_faults(
    config: ComparedOptions, other: Literal["ms", "mslite", "mindformers"]
) -> Iterator[Fault]:
    yield from pair_faults(config)
    if config.use_parallel:
        yield fault((KEY, "use_parallel"), f"{KEY}={other} is for one process: use_parallel=false")
    if config.only_save_strategy:
        yield fault(
            (KEY, "only_save_strategy"), f"{KEY}={other} has no effect: only_save_strategy=true"
        )
    if other == "mindformers" and not config.runs_mindformers:
        yield fault(
            (KEY, "run_mode"),
            f"{KEY}={other}: MindFormers has no adapters of each prompt, which"
            f" run_mode={config.run_mode} is for; expected ms, or mslite with engine=native",
        )
    options, named = config.generation(), {config.backend, other}
    if "mindformers" in named and options.do_sample:
        yield fault(
            (KEY, "do_sample"),
            f"{KEY}={other}: MindFormers draws other tokens than lite-runner; do_sample=false"
            " compares",
        )
    if "mslite" in named:
        taken = {
            "adapter_path": (config.adapter_path, "adapters"),
            "prompt_logprobs": (options.prompt_logprobs is not None, "prompt_logprobs"),
            "context.mode": (config.context.mode == 1, "pynative mode"),
            "model.model_config.use_past": (not config.use_past, "use_past=false"),
        }
        for key, (asked, what) in taken.items():
            if asked and config.backend != "mslite":
                yield fault((KEY, key), f"{KEY}=mslite: exported models have no {what}")
    for one in mindformers_run_faults(replace(config, backend=other)):
        yield fault((KEY, *one.keys), f"{KEY}={other}: {one.text}")
