"""Validation errors of options that few runs use: exported models, MindFormers, comparisons."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lite_runner.architectures.quantization import is_narrow
from lite_runner.config import Invalid, invalid, show
from lite_runner.config.prompts import samples
from lite_runner.config.schema import (
    AdapterOptions,
    CompareOptions,
    ComputeOptions,
    ExportedOptions,
    GenerateOptions,
)
from lite_runner.errors import ConfigError
from lite_runner.system.secret import encryption_key

if TYPE_CHECKING:
    from lite_runner.config.checks import ComparedOptions

EngineName = Literal["lite", "lite-worker", "graph-cell"]
ENGINES: dict[str, tuple[EngineName, ...]] = {
    "resizable": ("lite", "lite-worker"),
    "static_pair": ("lite", "graph-cell"),
    "full": ("lite", "graph-cell"),
    "no_cache": ("lite", "lite-worker", "graph-cell"),
}

# The reason why it runs neither a pair nor a full graph.
LITE_2_0 = (
    "MindSpore Lite 2.0, the one for CPUs, keeps no cache in a graph between runs, and reads MindIR"
    " of version 1, where MindSpore 2.10 writes version 3; for it the layout resizable is written"
)


def exported_errors(config: ExportedOptions, settings: Mapping[str, bool]) -> Iterator[Invalid]:
    """All validation errors of exporting and of running an exported model; `settings`: those of
    exported models by their keys, true where they are given."""
    offline = config.writes_graphs or config.in_lite
    if config.context.mode == 1 and offline:
        yield invalid(
            ("context.mode", "backend", "run_mode"),
            "context.mode=1 (pynative): an exported model is a graph; context.mode=0, or"
            " backend=ms",
        )
    where = "run_mode=export" if config.run_mode == "eval" else "backend=mslite or run_mode=export"
    for key, given in settings.items():
        if given and not offline:
            yield invalid(key, f"{key} has an effect only with {where}")
    yield from _full_graph(config)
    yield from _engine(config)
    yield from _given_model(config)
    if config.infer.rank_id and config.seed is None and samples(config):
        yield invalid(
            "seed",
            f"seed: infer.rank_id={config.infer.rank_id} is a process started by hand, which does"
            " not get the seed that another process draws; give all of them the same: seed=1",
        )
    try:
        encryption_key(config.infer.enc_key)
    except ConfigError as error:
        yield invalid("infer.enc_key", error.message)


def _full_graph(config: ExportedOptions) -> Iterator[Invalid]:
    """Validation errors of an exported model without a cache."""
    past, infer = "model.model_config.use_past", config.infer
    offline = config.writes_graphs or config.in_lite
    if not offline or not config.full_graph or config.in_mindformers:
        return
    if not config.use_past and config.writes_graphs and infer.increment_model_path:
        yield invalid(
            (past, "infer.increment_model_path"),
            f"infer.increment_model_path: {past}=false writes one graph, without a cache; leave"
            f" the path out, or {past}=true",
        )
    refused = {
        f"export.layout={config.export.layout}": config.export.chosen_layout is not None,
        f"quant={config.quantization}": config.quantization.rounds,
    }
    for key, value in refused.items():
        if value:
            yield invalid(
                (past, key.partition("=")[0], "infer.prefill_model_path"),
                f"{key} has a cache, and {past}=false, or an infer.prefill_model_path alone, means"
                " a graph without one",
            )


def _engine(config: ExportedOptions) -> Iterator[Invalid]:
    """Validation errors of layout, engine and file type of an exported model together."""
    layout, engine = config.export.layout, config.engine
    forced = {
        "model.model_config.is_sample_acceleration": _sampled(config),
        "export.target=Ascend": config.export.target == "Ascend",
        "parallel_config.model_parallel": config.ranks.tensor > 1,
        "infer.prefill_model_path": config.writes_graphs and config.infer.prefill_model_path,
    }
    if layout == "resizable":
        for key, value in forced.items():
            if value:
                yield invalid(
                    (key.partition("=")[0], "export.layout"),
                    f"{key} needs export.layout=static_pair; got {layout}",
                )
    chosen = config.export.chosen_layout
    if chosen is not None and config.chosen_engine not in (None, *ENGINES[chosen]):
        wants = " or ".join(ENGINES[chosen])
        yield invalid(
            ("export.layout", "engine"),
            f"export.layout={layout} runs in engine={wants}, not {engine}",
        )
    lite_only = layout in ("auto", "resizable") and engine != "graph-cell"
    if config.infer.model_type == "mindir_lite" and not config.runs_given_model:
        pair = forced | {"model.model_config.use_past=false": config.full_graph}
        wanted = {f"export.layout={layout}, engine={engine}": not lite_only} | pair
        for key in [key for key, value in wanted.items() if value][:1]:
            yield invalid(
                ("infer.model_type", key.partition("=")[0]),
                f"infer.model_type=mindir_lite needs export.layout=resizable, got {key}:"
                f" {LITE_2_0}; leave infer.model_type out",
            )
    if config.export.weight_fp16 and config.infer.model_type == "mindir":
        yield invalid(
            ("export.weight_fp16", "infer.model_type"),
            "export.weight_fp16=true needs infer.model_type=mindir_lite",
        )
    if config.infer.enc_key and (layout == "resizable" or engine == "lite-worker"):
        yield invalid(
            ("infer.enc_key", "export.layout"),
            "infer.enc_key needs export.layout=static_pair: the public MindSpore Lite"
            " reads no encrypted model",
        )


def _given_model(config: ExportedOptions) -> Iterator[Invalid]:
    """Validation errors of the exported model's paths, read or written."""
    infer = config.infer
    paths = {
        "infer.prefill_model_path": infer.prefill_model_path,
        "infer.increment_model_path": infer.increment_model_path,
    }
    if infer.model_dir and any(paths.values()):
        yield invalid(
            ("infer.model_dir", *paths),
            "infer.model_dir and infer.prefill_model_path both say which model; give one of them",
        )
    if infer.increment_model_path and not infer.prefill_model_path:
        yield invalid(
            tuple(paths),
            "infer.increment_model_path is the second of a pair; infer.prefill_model_path is empty",
        )
    if not config.writes_graphs or not infer.prefill_model_path:
        return
    given = {key: Path(path) for key, path in paths.items() if path}
    keys, names = " and ".join(given), [one.name.removesuffix(".mindir") for one in given.values()]
    first, second = next(iter(given.values())), list(given.values())[-1]
    together = first.parent == second.parent and len(set(names)) == len(given)
    beside = first.parent != second.parent and first.parent.parent == second.parent.parent
    if len(given) > 1 and (not (together or beside) or not all(names)):
        yield invalid(
            tuple(paths),
            f"{keys}: expected two names in one folder, or in two folders beside each other, got"
            f" {show(str(first))} and {show(str(second))}",
        )
    elif not all(re.fullmatch(r"[\w@.:-]+", name, re.ASCII) for name in names):
        yield invalid(
            tuple(paths),
            f"{keys}: got the names {names}, expected letters, digits and _ @ . : - , which"
            " MindSpore takes (the folder may have any name)",
        )


def _sampled(config: ExportedOptions) -> bool:
    return config.model.model_config.is_sample_acceleration


COMPARE = "compare_backend"


# Generation options that MindFormers supports.
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


def without_mindformers(release: str) -> Invalid:
    """The error of a release of MindFormers where it does not compute."""
    key = "mindformers.release"
    return invalid((key, "backend"), f"{key}={release} has an effect only with backend=mindformers")


def mindformers_model_errors(config: ComputeOptions) -> Iterator[Invalid]:
    """Validation errors of model options that MindFormers lacks."""
    if not config.in_mindformers or not config.runs_mindformers:
        return
    adapter = isinstance(config, AdapterOptions) and config.adapter_path
    exports = not isinstance(config, GenerateOptions)
    refused = {
        "parallel_config.model_parallel": (
            exports and config.ranks.tensor > 1,
            "ranks that share a model to export",
        ),
        "adapter_path": (adapter, "adapters of each prompt"),
        "model.model_config.pet_config": (
            config.model.model_config.pet_config is not None,
            "an adapter or learned keys in the checkpoint",
        ),
        "quant": (config.quant not in (None, "none"), "quantized weights"),
        "kv_cache": (is_narrow(config.kv_cache), "a cache of another type"),
        "context.mode": (config.context.mode == 1, "pynative mode"),
        "model.model_config.compute_dtype": (
            config.precision.weights("CPU") == "bfloat16",
            "bfloat16",
        ),
    }
    yield from _refused(refused)


def mindformers_run_errors(config: GenerateOptions) -> Iterator[Invalid]:
    """Validation errors of run options that MindFormers lacks."""
    if not config.in_mindformers or not config.runs_mindformers:
        return
    options = config.generation()
    past = "model.model_config.use_past"
    refused = {
        one.name: (getattr(options, one.name) != one.default, _CALLED.get(one.name, one.name))
        for one in fields(options)
        if one.name not in _OF_MINDFORMERS
    }
    refused["speculate"] = (config.demands_drafts, "speculative decoding")
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
    """Validation errors of requested keys, with the name of each feature."""
    for key, (asked, what) in refused.items():
        if asked:
            yield invalid(
                (key, "backend"), f"{key}: backend=mindformers has no {what}; backend=ms does this"
            )


def pair_errors(config: CompareOptions) -> Iterator[Invalid]:
    """Validation errors of a comparison with the same backend, or without weights."""
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


def compare_errors(config: ComparedOptions, compared: ComparedOptions) -> Iterator[Invalid]:
    """Validation errors of a run with the one that it is `compared` with."""
    yield from pair_errors(config)
    other = compared.backend
    if config.use_parallel:
        yield invalid(
            (COMPARE, "use_parallel"), f"{COMPARE}={other} is for one process: use_parallel=false"
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
