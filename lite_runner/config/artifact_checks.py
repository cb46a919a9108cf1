"""The keys of run modes that write models (export, convert, shard), and their validation errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, get_args

from lite_runner.config.checks import strategy_faults
from lite_runner.config.fields import Fault, fault
from lite_runner.config.ge import ge_faults
from lite_runner.config.generate_checks import (
    adapter_faults,
    mindformers_model_faults,
    without_mindformers,
)
from lite_runner.config.offline_checks import ENGINES, offline_faults
from lite_runner.config.parallel import DATA_KEYS
from lite_runner.config.schema import (
    AdapterOptions,
    BatchOptions,
    ExportedOptions,
    MindFormersOptions,
    OverwriteOptions,
    SaveStrategyOptions,
    StrategyOptions,
)
from lite_runner.config.sections import AdapterFormat, CheckpointFormat, MindFormers, Release
from lite_runner.records import Count, Index, OutputPath, dataclass


@dataclass(frozen=True, kw_only=True)
class ExportOptions(
    ExportedOptions, BatchOptions, AdapterOptions, OverwriteOptions, MindFormersOptions
):
    """Exporting a model, with an adapter merged where one is named."""

    writes_graphs: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False

    export_output: OutputPath  # "": named in output_dir


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
    if config.in_mindformers:
        yield from mindformers_model_faults(config)
        yield from _mindformers_faults(config)
    elif (release := config.mindformers_release) is not None:
        yield without_mindformers(release)


def _mindformers_faults(config: ExportOptions) -> Iterator[Fault]:
    """Options that do not apply to graphs of MindFormers."""
    if config.use_past:
        past = "model.model_config.use_past"
        yield fault(
            (past, "backend"),
            "backend=mindformers: its pair of graphs with a cache, which MindSpore 2.0 writes, runs"
            f" in no engine here; add {past}=false",
        )
    refused = {
        "engine": config.chosen_engine not in (None, *ENGINES["resizable"]),
        "export.layout": config.export.chosen_layout is not None,
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


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(AdapterOptions, OverwriteOptions):
    """Options of run_mode=convert."""

    writes_floats: ClassVar[bool] = True

    convert_format: CheckpointFormat | AdapterFormat
    convert_output: OutputPath
    merge: bool
    mindformers: MindFormers | None

    @property
    def needs_checkpoint(self) -> bool:
        """Adapters are converted by the model's sizes alone."""
        of_adapters = self.convert_format in get_args(AdapterFormat)
        return not of_adapters or self.model_config() is None

    @property
    def release(self) -> Release:
        """The release of MindFormers that is to read what is converted. Raises ValueError."""
        return Release.of(self.mindformers.release if self.mindformers else None)


def convert_faults(config: ConvertOptions) -> Iterator[Fault]:
    """Validation errors of a conversion."""
    if not config.convert_output:
        yield fault("convert_output", "convert_output is empty; give the file or folder to write")
    yield from _release_faults(config)
    yield from adapter_faults(config, one=True)
    keys = ("convert_format", "merge", "adapter_path")
    path, form = config.adapter_path, config.convert_format
    if config.merge and not path:
        yield fault(keys, "merge=true needs adapter_path=, the adapter to merge")
    elif form in get_args(AdapterFormat):
        if config.merge:
            yield fault(
                keys,
                f"convert_format={form} is of adapters; merge=true writes a checkpoint: ckpt,"
                " safetensors or huggingface",
            )
        elif not path:
            yield fault(keys, f"convert_format={form} needs adapter_path=, the adapters to convert")
    elif path and not config.merge:
        yield fault(
            keys,
            f"convert_format={form} with adapter_path=: expected peft or mindformers to convert"
            " adapters, or merge=true to merge one into the checkpoint",
        )


def _release_faults(config: ConvertOptions) -> Iterator[Fault]:
    try:
        chosen = config.release.number is not None
    except ValueError as error:
        yield fault("mindformers.release", f"mindformers.release: {error}")
        return
    form = config.convert_format
    if chosen and form in ("huggingface", "peft"):
        yield fault(
            ("mindformers.release", "convert_format"),
            f"mindformers.release has no effect with convert_format={form}, which MindFormers"
            " is not meant to read",
        )


@dataclass(frozen=True, kw_only=True)
class ShardOptions(StrategyOptions, SaveStrategyOptions, OverwriteOptions):
    """Options of run_mode=shard."""

    takes_parallel: ClassVar[bool] = True
    writes_floats: ClassVar[bool] = True

    shard_output: OutputPath  # "": named in output_dir
    shard_format: Literal["ckpt", "safetensors"]
    transform_process_num: Count
    transform_rank: Index | None  # null: all

    @property
    def vocab_parallel(self) -> bool:
        """As RunConfig's, but whole by default: so a network of MindFormers is loaded, and a run of
        ours cuts them as it reads."""
        return self.parallel_config.vocab_emb_dp is False


def shard_faults(config: ShardOptions) -> Iterator[Fault]:
    """Validation errors of sharding and merging."""
    yield from strategy_faults(config)
    strategy = config.src_strategy_path_or_dir
    if strategy and config.only_save_strategy:
        yield fault(
            ("src_strategy_path_or_dir", "only_save_strategy"),
            f"src_strategy_path_or_dir={strategy} has no effect with only_save_strategy=true,"
            " which reads no weights",
        )
    asked = config.parallel_config
    ranks = asked.data_parallel * asked.model_parallel if config.use_parallel else 1
    suffix = f".{config.shard_format}"
    one_file = ranks == 1 and not config.only_save_strategy
    if one_file and config.shard_output and not config.shard_output.endswith(suffix):
        yield fault(
            ("shard_output", "shard_format", "parallel"),
            f"shard_output: got {config.shard_output}, expected the name of a {suffix} file to"
            " merge to; parallel=tp2 (or another) shards for several ranks",
        )
    if config.transform_rank is not None and config.transform_rank >= ranks:
        yield fault(
            ("transform_rank", "parallel"),
            f"transform_rank: got {config.transform_rank}, expected less than the {ranks} of the"
            " parallel group",
        )
    if config.transform_rank is not None and config.only_save_strategy:
        yield fault(
            ("transform_rank", "only_save_strategy"),
            "transform_rank has no effect with only_save_strategy=true, which writes no weights",
        )
