"""Validation errors of exports, and of runs of exported models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lite_runner.config.cluster import ranks_of
from lite_runner.config.engines import ENGINES
from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.options import ExportedOptions
from lite_runner.config.secret import encryption_key
from lite_runner.config.seeds import samples
from lite_runner.errors import ConfigError


def offline_faults(config: ExportedOptions) -> Iterator[Fault]:
    """All validation errors of exporting and of running an exported model."""
    offline = config.writes_graphs or config.backend in ("mslite", "auto")
    if config.context.mode == 1 and offline:
        yield fault(
            ("context.mode", "backend", "run_mode"),
            "context.mode=1 (pynative): an exported model is a graph; context.mode=0, or"
            " backend=ms",
        )
    given = {
        "engine": config.engine != "auto",
        "export.layout": config.export.layout != "auto",
        "export.target": config.export.target != "auto",
        "export.weight_fp16": config.export.weight_fp16,
        "infer.model_dir": config.infer.model_dir,
        "infer.prefill_model_path": config.infer.prefill_model_path,
        "infer.increment_model_path": config.infer.increment_model_path,
        "infer.enc_key": config.infer.enc_key,
        "model.model_config.is_sample_acceleration": _sampled(config),
        "infer.infer_seq_length": config.infer.infer_seq_length,
        "infer.model_type": config.infer.model_type is not None,
        "infer.ge_config_path": config.infer.ge_config_path,
        "ge": config.infer.ge_options is not None,
    }
    for key, value in given.items():
        if value and not offline:
            yield fault(key, f"{key} has an effect only with backend=mslite or run_mode=export")
    if offline and not config.use_past and config.backend != "mindformers":
        yield fault(
            ("model.model_config.use_past", "backend"),
            "model.model_config.use_past=false is not available with an exported model",
        )
    yield from _engine(config)
    yield from _given_model(config)
    if config.infer.rank_id and config.seed is None and samples(config):
        yield fault(
            "seed",
            f"seed: infer.rank_id={config.infer.rank_id} is a process started by hand, which does"
            " not get the seed that another process draws; give all of them the same: seed=1",
        )
    try:
        encryption_key(config.infer.enc_key)
    except ConfigError as error:
        yield fault("infer.enc_key", error.message)


def _engine(config: ExportedOptions) -> Iterator[Fault]:
    """Combinations of layout, engine and file type of an exported model."""
    layout, engine = config.export.layout, config.engine
    forced = {
        "model.model_config.is_sample_acceleration": _sampled(config),
        "export.target=Ascend": config.export.target == "Ascend",
        "parallel_config.model_parallel": ranks_of(config).tensor > 1,
        "infer.prefill_model_path": config.writes_graphs and config.infer.prefill_model_path,
    }
    if layout in ("resizable", "dynamic"):
        for key, value in forced.items():
            if value:
                yield fault(
                    (key.partition("=")[0], "export.layout"),
                    f"{key} needs export.layout=static_pair; got {layout}",
                )
    if layout != "auto" and engine not in ("auto", *ENGINES[layout]):
        wants = " or ".join(ENGINES[layout])
        yield fault(
            ("export.layout", "engine"),
            f"export.layout={layout} runs in engine={wants}, not {engine}",
        )
    if config.takes_packed:
        refused = forced | {
            "export.weight_fp16": config.export.weight_fp16,
            "infer.model_type": config.infer.model_type is not None,
            "infer.enc_key": config.infer.enc_key,
        }
        for key, value in refused.items():
            if value:
                yield fault(
                    (key.partition("=")[0], "engine"),
                    f"{key} is of MindIR graphs; engine=native (export.layout=packed) has none",
                )
    lite_only = layout in ("auto", "resizable") and engine != "graph-cell"
    if config.infer.model_type == "mindir_lite" and not lite_only:
        yield fault(
            ("infer.model_type", "export.layout"),
            "infer.model_type=mindir_lite is for MindSpore Lite: export.layout=resizable",
        )
    if config.export.weight_fp16 and config.infer.model_type == "mindir":
        yield fault(
            ("export.weight_fp16", "infer.model_type"),
            "export.weight_fp16=true needs infer.model_type=mindir_lite",
        )
    if config.infer.enc_key and (layout == "resizable" or engine == "lite-worker"):
        yield fault(
            ("infer.enc_key", "export.layout"),
            "infer.enc_key needs export.layout=dynamic or static_pair: the public MindSpore Lite"
            " reads no encrypted model",
        )


def _given_model(config: ExportedOptions) -> Iterator[Fault]:
    """Paths of the exported model: read, or written."""
    infer = config.infer
    paths = {
        "infer.prefill_model_path": infer.prefill_model_path,
        "infer.increment_model_path": infer.increment_model_path,
    }
    if infer.model_dir and any(paths.values()):
        yield fault(
            ("infer.model_dir", *paths),
            "infer.model_dir and infer.prefill_model_path both say which model; give one of them",
        )
    if infer.increment_model_path and not infer.prefill_model_path:
        yield fault(
            tuple(paths),
            "infer.increment_model_path is the second of a pair; infer.prefill_model_path is empty",
        )
    if not config.writes_graphs or not any(paths.values()):
        return
    if infer.prefill_model_path and not infer.increment_model_path:
        yield fault(
            tuple(paths), "infer.increment_model_path is empty; an export writes both of a pair"
        )
    elif infer.prefill_model_path:
        first, second = (Path(path) for path in paths.values())
        names = [path.name.removesuffix(".mindir") for path in (first, second)]
        together = first.parent == second.parent and names[0] != names[1]
        beside = first.parent != second.parent and first.parent.parent == second.parent.parent
        if not (together or beside) or not all(names):
            yield fault(
                tuple(paths),
                "infer.prefill_model_path and infer.increment_model_path: expected two names in"
                " one folder, or in two folders beside each other, got"
                f" {show(str(first))} and {show(str(second))}",
            )
        elif not all(re.fullmatch(r"[\w@.:-]+", name, re.ASCII) for name in names):
            yield fault(
                tuple(paths),
                f"infer.prefill_model_path and infer.increment_model_path: got the names {names},"
                " expected letters, digits and _ @ . : - , which MindSpore takes (the folder may"
                " have any name)",
            )


def _sampled(config: ExportedOptions) -> bool:
    return config.model.model_config.is_sample_acceleration
