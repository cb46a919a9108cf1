"""The keys of an export, and their validation errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from lite_runner.config.adapter_checks import adapter_faults
from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.ge import ge_faults
from lite_runner.config.mindformers_run_checks import mindformers_model_faults, without_mindformers
from lite_runner.config.offline_checks import offline_faults
from lite_runner.config.options import (
    AdapterOptions,
    BatchOptions,
    ExportedOptions,
    MindFormersOptions,
    OverwriteOptions,
)
from lite_runner.config.parallel import DATA_KEYS
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ExportOptions(
    ExportedOptions, BatchOptions, AdapterOptions, OverwriteOptions, MindFormersOptions
):
    """Exporting a model, with an adapter merged where one is named."""

    writes_graphs: ClassVar[bool] = True

    export_output: str  # "": named in output_dir


def export_faults(config: ExportOptions) -> Iterator[Fault]:
    """Validation errors of an export."""
    infer = config.infer
    if infer.model_dir:
        yield fault("infer.model_dir", "infer.model_dir is read; give export_output=FOLDER")
    if config.export_output and (infer.prefill_model_path or infer.increment_model_path):
        yield fault(
            ("export_output", "infer.prefill_model_path", "infer.increment_model_path"),
            "export_output and infer.prefill_model_path both say where to write; give one of them",
        )
    if config.use_parallel and (replicas := config.parallel_config.data_parallel) > 1:
        yield fault(
            (*DATA_KEYS, "run_mode"),
            f"parallel_config.data_parallel: got {replicas}, expected 1 with run_mode=export: all"
            " replicas run the same graphs",
        )
    yield from adapter_faults(config, one=True)
    yield from strategy_faults(config)
    yield from offline_faults(config)
    yield from ge_faults(config)
    if config.backend == "mindformers":
        yield from mindformers_model_faults(config)
        yield from _mindformers_faults(config)
    elif (release := config.mindformers_release) is not None:
        yield without_mindformers(release)


def _mindformers_faults(config: ExportOptions) -> Iterator[Fault]:
    """What the graphs of MindFormers are not."""
    if config.use_past:
        past = "model.model_config.use_past"
        yield fault(
            (past, "backend"),
            "backend=mindformers: its pair of graphs with a cache, which MindSpore 2.0 writes, runs"
            f" in no engine here; add {past}=false",
        )
    refused = {
        "engine": config.engine not in ("auto", "lite", "lite-worker"),
        "export.layout": config.export.layout != "auto",
        "export.target": config.export.target == "Ascend",
        "export.weight_fp16": config.export.weight_fp16,
        "infer.model_type": config.infer.model_type == "mindir_lite",
        "infer.enc_key": config.infer.enc_key,
        "infer.prefill_model_path": config.infer.prefill_model_path,
        "model.model_config.is_sample_acceleration": (
            config.model.model_config.is_sample_acceleration
        ),
    }
    for key, asked in refused.items():
        if asked:
            yield fault(
                (key, "backend"),
                f"{key}: backend=mindformers exports one graph of float32 for MindSpore Lite;"
                " backend=ms does this",
            )
