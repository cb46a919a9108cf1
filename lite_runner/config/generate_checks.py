"""Validation errors of run modes that generate, alone, in a session or with two backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import ClassVar

from lite_runner.config.checks import strategy_errors
from lite_runner.config.fields import Invalid, invalid, show
from lite_runner.config.offline_checks import offline_errors
from lite_runner.config.parallel import ranks_of, replica_errors
from lite_runner.config.prompts import adapter_names, prompt_errors, request_errors
from lite_runner.config.sampling_checks import sampling_errors
from lite_runner.config.schema import (
    AdapterOptions,
    CompareOptions,
    ComputeOptions,
    ExportedOptions,
    GenerateOptions,
    MindFormersOptions,
    RunConfig,
    SessionOptions,
)
from lite_runner.records import dataclass

COMPARE = "compare_backend"
# Options of a generation that MindFormers has; it is asked for none of the others.
_OF_MINDFORMERS = (
    *("max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "seed"),
    *("repetition_penalty", "num_beams", "eos_token_id", "pad_token_id"),
)
_CALLED = {
    "stop": "stop strings",
    "logprobs": "log-probabilities",
    "prompt_logprobs": "log-probabilities",
    "num_return_sequences": "several texts of a prompt",
    "length_penalty": "a length penalty",
}


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComparedOptions(GenerateOptions, CompareOptions):
    """Options of run modes that complete prompts once."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ComparedOptions, MindFormersOptions):
    """Options of run_mode=predict."""


@dataclass(frozen=True, kw_only=True)
class SloraOptions(ComparedOptions):
    """Options of run_mode=slora."""

    adapter_lines: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False


def generate_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """All validation errors of a run that generates."""
    yield from prompt_errors(config)
    yield from request_errors(config)
    yield from sampling_errors(config, config.generation(), vars(config))
    yield from adapter_errors(config, one=False)
    if config.only_save_strategy and not config.use_parallel:
        yield invalid(
            ("only_save_strategy", "use_parallel"),
            "only_save_strategy=true needs use_parallel=true",
        )
    for key in ("src_strategy_path_or_dir", "auto_trans_ckpt"):
        if config.runs_given_model and (value := getattr(config, key)):
            yield invalid(
                key,
                f"{key}={value if isinstance(value, str) else show(value)} has no effect"
                " with an exported model, which has its weights in it",
            )
    if not config.runs_given_model:
        yield from strategy_errors(config)
    yield from offline_errors(config)
    yield from mindformers_run_errors(config)
    yield from replica_errors(config)
    yield from _speculation_errors(config)
    if config.num_beams is not None and config.num_beams > 1:
        given = {"speculate": config.speculate != "none", "draft_model": bool(config.draft_model)}
        for key in (key for key, is_given in given.items() if is_given):
            yield invalid(
                (key, "num_beams"),
                f"{key}={getattr(config, key)} has no effect with num_beams={config.num_beams}:"
                " beams change until the end",
            )


def _speculation_errors(config: GenerateOptions | SessionOptions) -> Iterator[Invalid]:
    if config.speculate != "none" and config.draft_model:
        yield invalid(
            ("speculate", "draft_model"),
            f"speculate={config.speculate} and draft_model={config.draft_model} both draft tokens;"
            " give one of them",
        )


def adapter_errors(config: AdapterOptions, *, one: bool) -> Iterator[Invalid]:
    """Validation errors of LoRA adapters; with `one` a run mode takes a single one."""
    for key in ("adapter_id", "adapter_root", "max_loaded_adapters", "adapter_dtype"):
        if getattr(config, key, None) in (None, "", "auto"):
            continue
        if key == "adapter_id" and not adapter_names(config.adapter_id):
            continue  # the base model, which every run has
        if not config.takes_adapters:
            yield invalid((key, "adapter_path"), f"{key} needs adapter_path=lora_adapter.json")
    ids = config.adapter_id
    nameless = ids is not None and (isinstance(ids, tuple) or not adapter_names(ids))
    if one and nameless:
        got = show(config.adapter_id)
        yield invalid("adapter_id", f"adapter_id: got {got}, expected the name of one adapter")


def session_errors(config: SessionOptions) -> Iterator[Invalid]:
    """Validation errors of run modes that load a model for later prompts."""
    yield from sampling_errors(config, config.generation(), vars(config))
    yield from adapter_errors(config, one=False)
    yield from _speculation_errors(config)
    if not config.runs_given_model:
        yield from strategy_errors(config)
    yield from offline_errors(config)


def mindformers_available_errors(config: RunConfig) -> Iterator[Invalid]:
    """Run modes that backend=mindformers does not have."""
    if config.in_mindformers and not config.runs_mindformers:
        yield invalid(
            ("backend", "run_mode"),
            f"backend=mindformers is not available with run_mode={config.run_mode}; expected"
            " run_mode=predict, eval or export, or backend=ms",
        )


def without_mindformers(release: str) -> Invalid:
    """A release of MindFormers, which does not compute."""
    key = "mindformers.release"
    return invalid((key, "backend"), f"{key}={release} has an effect only with backend=mindformers")


def mindformers_model_errors(config: ComputeOptions) -> Iterator[Invalid]:
    """Options of computing with a model that MindFormers lacks."""
    if not config.in_mindformers or not config.runs_mindformers:
        return
    adapter = isinstance(config, AdapterOptions) and config.adapter_path
    exports = not isinstance(config, GenerateOptions)
    refused = {
        "parallel_config.model_parallel": (
            exports and ranks_of(config).tensor > 1,
            "ranks that share a model to export",
        ),
        "adapter_path": (adapter, "adapters of each prompt"),
        "model.model_config.pet_config": (config.merges_adapter, "an adapter in the checkpoint"),
        "quant": (config.quant not in (None, "none"), "quantized weights"),
        "kv_cache": (config.narrow_cache, "a cache of another type"),
        "context.mode": (config.context.mode == 1, "pynative mode"),
        "model.model_config.compute_dtype": (
            config.weights_dtype("CPU") == "bfloat16",
            "bfloat16",
        ),
    }
    yield from _refused(refused)


def mindformers_run_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """Options of a run that MindFormers lacks."""
    if not config.in_mindformers or not config.runs_mindformers:
        return
    options = config.generation()
    past = "model.model_config.use_past"
    refused = {
        one.name: (getattr(options, one.name) != one.default, _CALLED.get(one.name, one.name))
        for one in fields(options)
        if one.name not in _OF_MINDFORMERS
    }
    refused["speculate"] = (config.speculate == "ngram", "speculative decoding")
    refused["draft_model"] = (config.draft_model, "speculative decoding")
    yield from mindformers_model_errors(config)
    yield from _refused(refused)
    if options.num_beams > 1 and config.use_past:
        yield invalid(
            ("num_beams", past, "backend"),
            f"num_beams={options.num_beams}: MindFormers' beam search has no cache; add"
            f" {past}=false",
        )


def _refused(refused: Mapping[str, tuple[object, str]]) -> Iterator[Invalid]:
    """Keys that ask for something, and what that is."""
    for key, (asked, what) in refused.items():
        if asked:
            yield invalid(
                (key, "backend"), f"{key}: backend=mindformers has no {what}; backend=ms does this"
            )


def predict_errors(config: PredictOptions) -> Iterator[Invalid]:
    """All validation errors of run_mode=predict."""
    yield from completion_errors(config)
    if (release := config.mindformers_release) is not None and not config.names_mindformers:
        yield without_mindformers(release)


def completion_errors(config: ComparedOptions) -> Iterator[Invalid]:
    """Validation errors of completing prompts, with one backend or two."""
    yield from generate_errors(config)
    if (compared := config.compared) is not None:
        yield from _compare_errors(config, compared)


def pair_errors(config: CompareOptions) -> Iterator[Invalid]:
    """Two backends that are none: the same, or one without weights."""
    other = config.compare_backend
    if other is None:
        return
    if other in (config.backend, "auto"):
        yield invalid(
            (COMPARE, "backend"),
            f"{COMPARE}={other}: got backend={config.backend}, expected another one by name",
        )
    given = isinstance(config, ExportedOptions) and config.runs_given_model
    if given and config.in_lite and not config.checkpoint_source:
        yield invalid(
            (COMPARE, "load_checkpoint", "infer.model_dir"),
            f"{COMPARE}={other} computes with the weights that the exported model was made from;"
            " load_checkpoint= names them",
        )


def _compare_errors(config: ComparedOptions, compared: ComparedOptions) -> Iterator[Invalid]:
    yield from pair_errors(config)
    other = compared.backend
    if config.use_parallel:
        yield invalid(
            (COMPARE, "use_parallel"),
            f"{COMPARE}={other} is for one process: use_parallel=false",
        )
    if config.only_save_strategy:
        yield invalid(
            (COMPARE, "only_save_strategy"),
            f"{COMPARE}={other} has no effect: only_save_strategy=true",
        )
    if compared.in_mindformers and not config.runs_mindformers:
        yield invalid(
            (COMPARE, "run_mode"),
            f"{COMPARE}={other}: MindFormers has no adapters of each prompt, which"
            f" run_mode={config.run_mode} is for; expected native or ms",
        )
    options = config.generation()
    if config.names_mindformers and options.do_sample:
        yield invalid(
            (COMPARE, "do_sample"),
            f"{COMPARE}={other}: MindFormers draws other tokens than lite-runner; do_sample=false"
            " compares",
        )
    if compared.in_lite and not config.in_lite:
        taken = {
            "adapter_path": (config.adapter_path, "adapters"),
            "prompt_logprobs": (options.prompt_logprobs is not None, "prompt_logprobs"),
            "context.mode": (config.context.mode == 1, "pynative mode"),
            "model.model_config.use_past": (not config.use_past, "use_past=false"),
        }
        for key, (asked, what) in taken.items():
            if asked:
                yield invalid((COMPARE, key), f"{COMPARE}=mslite: exported models have no {what}")
    for one in mindformers_run_errors(compared):
        yield invalid((COMPARE, *one.keys), f"{COMPARE}={other}: {one.text}")
