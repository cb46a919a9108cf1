"""Validation errors of exports, and of runs of exported models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from lite_runner.config.fields import Invalid, Note, invalid, show
from lite_runner.config.parallel import ranks_of
from lite_runner.config.prompts import samples
from lite_runner.config.schema import Exported, ExportedOptions
from lite_runner.errors import ConfigError
from lite_runner.system.secret import encryption_key

EngineName = Literal["lite", "lite-worker", "graph-cell"]
ENGINES: dict[str, tuple[EngineName, ...]] = {
    "resizable": ("lite", "lite-worker"),
    "static_pair": ("lite", "graph-cell"),
    "full": ("lite", "graph-cell"),
    "no_cache": ("lite", "lite-worker", "graph-cell"),
}

# Why it runs neither a pair nor a full graph.
LITE_2_0 = (
    "MindSpore Lite 2.0, the one for CPUs, keeps no cache in a graph between runs, and reads MindIR"
    " of version 1, where MindSpore 2.10 writes version 3; for it the layout resizable is written"
)


def with_backend(config: Exported, errors: list[Invalid], notes: list[Note]) -> Exported:
    """The config with the backend that its other settings mean: engine=native is the old name of
    backend=native, and what only exported models have makes of auto mslite."""
    if config.engine == "native":
        if config.backend not in ("auto", "mslite", "native"):
            text = f"engine=native is backend=native; got backend={config.backend}"
            errors.append(invalid(("engine", "backend"), text))
        if config.writes_graphs:
            text = "engine=native is backend=native, which runs a checkpoint without an export"
            errors.append(invalid(("engine", "run_mode"), text))
        notes.append(Note("engine=native is backend=native now: leave engine= out"))
        return replace(config, backend="native", engine="auto")
    asked = not config.writes_graphs and any(offline_settings(config).values())
    return replace(config, backend="mslite") if config.backend == "auto" and asked else config


def offline_errors(config: ExportedOptions) -> Iterator[Invalid]:
    """All validation errors of exporting and of running an exported model."""
    offline = config.writes_graphs or config.in_lite
    if config.context.mode == 1 and offline:
        yield invalid(
            ("context.mode", "backend", "run_mode"),
            "context.mode=1 (pynative): an exported model is a graph; context.mode=0, or"
            " backend=ms",
        )
    where = "run_mode=export" if config.run_mode == "eval" else "backend=mslite or run_mode=export"
    for key, given in offline_settings(config).items():
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


def offline_settings(config: ExportedOptions) -> dict[str, bool]:
    """The settings of exported models by their keys, and whether each is given."""
    infer, export = config.infer, config.export
    return {
        "engine": config.chosen_engine is not None,
        "export.layout": export.chosen_layout is not None,
        "export.target": export.target != "auto",
        "export.weight_fp16": export.weight_fp16,
        "infer.model_dir": bool(infer.model_dir),
        "infer.prefill_model_path": bool(infer.prefill_model_path),
        "infer.increment_model_path": bool(infer.increment_model_path),
        "infer.enc_key": bool(infer.enc_key),
        "model.model_config.is_sample_acceleration": _sampled(config),
        "infer.infer_seq_length": infer.infer_seq_length is not None,
        "infer.model_type": infer.model_type is not None,
        "infer.ge_config_path": bool(infer.ge_config_path),
        "ge": infer.ge_options is not None,
    }


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
    """Combinations of layout, engine and file type of an exported model."""
    layout, engine = config.export.layout, config.engine
    forced = {
        "model.model_config.is_sample_acceleration": _sampled(config),
        "export.target=Ascend": config.export.target == "Ascend",
        "parallel_config.model_parallel": ranks_of(config).tensor > 1,
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
                f"infer.model_type=mindir_lite is of export.layout=resizable, not of {key}:"
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
    """Paths of the exported model: read, or written."""
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
