"""The plan of an export: layout, precision, sizes, the engine that verifies it, memory and disk."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Literal

from lite_runner import architectures, progress
from lite_runner.architectures.quantization import is_narrow
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import cache_length
from lite_runner.backends.lite.engine import (
    Device,
    EngineOptions,
    device_of,
    engine_for,
    why_unavailable,
)
from lite_runner.config.backend_checks import ENGINES
from lite_runner.config.sections import DType, ExportSettings, Ranks
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.mindir.graph_inputs import not_resizable
from lite_runner.mindir.manifest import Layout, fits_any, is_pair
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing import (
    BYTES_OF,
    Memory,
    cache_bytes,
    check_memory,
    export_need,
    float32_bytes,
)
from lite_runner.system.files import require_space
from lite_runner.system.secret import encryption_key
from lite_runner.text.tokenizer import Tokenizer

DEFAULT_LENGTH = 512  # positions of a layout that fixes them


@dataclass(frozen=True)
class ExportSpec:
    """Layout, precision and sizes of an exported model."""

    layout: Layout
    model_type: Literal["mindir", "mindir_lite"]
    weight_fp16: bool
    dtype: DType  # of the graph; weight_fp16 is only how a .ms stores its weights
    target: Device
    sampled: bool  # it ends in the likeliest token
    slots: int
    length: int  # positions of a slot
    rounded: DType = "float32"  # matrices are rounded to it, and computed with in `dtype`
    key: bytes | None = field(default=None, repr=False)
    ranks: int = 1  # tensor parallel, each with graphs of its own
    vocab_parallel: bool = True  # with several ranks: the embedding and the head are split too

    @property
    def fits_any(self) -> bool:
        return fits_any(self.layout)

    @property
    def precision(self) -> DType:
        return "float16" if self.weight_fp16 else self.dtype


@dataclass(frozen=True)
class ExportJob:
    """A model to export. Of several ranks each has the same job, but for its rank."""

    settings: ExportSettings
    files: ModelFiles
    tokenizer: Tokenizer | None  # lies beside the graphs; None: only a model in the cache will do
    spec: ExportSpec
    engine: EngineOptions  # that it is verified in
    ranks: Ranks = Ranks()

    @property
    def first(self) -> bool:
        """True for the rank that writes tokenizer, manifest and settings."""
        return self.ranks.rank == 0

    @property
    def memory(self) -> Memory:
        """Memory that writing it needs at its peak."""
        return export_need(_weights_and_cache(self.files, self.spec))

    @property
    def required_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where there is none."""
        if self.tokenizer is None:
            raise ConfigError(
                "an exported model has its tokenizer beside it, and there is none",
                "processor.tokenizer.tokenizer_file= names one",
            )
        return self.tokenizer


def job_of_export(
    settings: ExportSettings,
    files: ModelFiles,
    ranks: Ranks,
    tokenizer: Tokenizer | None = None,
    *,
    slots: int,
) -> ExportJob:
    """The export that run_mode=export writes, for batches of `slots` rows. Raises as `spec_of` and
    `engine_for`."""
    length = settings.infer.infer_seq_length or default_length(files.model)
    spec = spec_of(settings, files, slots, length)
    engine = engine_for(settings, spec.layout, ranks=ranks)
    return ExportJob(settings, files, tokenizer, spec, engine, ranks)


def default_length(model: Decoder) -> int:
    """Positions of a row, where the config says nothing."""
    return min(DEFAULT_LENGTH, model.seq_length)


def spec_of(settings: ExportSettings, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """The export that a config asks for; unset settings suit the first engine here that runs it.

    Raises ConfigError for what does not go together, EnvironmentFault where an engine was asked for
    that is not here.
    """
    if settings.in_mindformers:  # MindFormers writes its network without a cache
        return ExportSpec("no_cache", "mindir", False, "float32", "CPU", False, slots, length)
    key = encryption_key(settings.infer.enc_key)
    device = device_of(settings.context.device_target, dry_run=settings.dry_run)
    target = device if settings.export.target == "auto" else settings.export.target
    layout = choose_layout(settings, files.model, target)
    model_type = settings.infer.model_type
    if model_type is None:
        # A .ms loads in a fraction of a MindIR's time; run_mode=export writes what others can read.
        to_run = not settings.writes_graphs or settings.export.weight_fp16
        model_type = "mindir_lite" if fits_any(layout) and to_run else "mindir"
    dtype, rounded = settings.precision.computed(target), settings.precision.rounded(target)
    ranks = settings.tensor_ranks
    errors = architectures.unsupported(files.model)
    if files.quantization.rounds:
        errors.append(
            f"quant={files.quantization}: graphs compute with floats: quant=none, or backend=native"
            " without an export"
        )
    if settings.export.weight_fp16 and model_type != "mindir_lite":
        errors.append("export.weight_fp16=true needs infer.model_type=mindir_lite")
    errors += layout_errors(layout, files.model, dtype, encrypted=key is not None)
    if dtype == "bfloat16":
        errors.append(
            "an export in bfloat16 cannot be verified on a CPU; float16 or float32 can be"
        )
    if is_narrow(settings.kv_cache):
        errors.append(f"kv_cache={settings.kv_cache} needs backend=native")
    if ranks > 1 and key is not None and target != device:
        errors.append(f"infer.enc_key with several ranks needs the target device ({target}) here")
    if errors:
        raise ConfigError.of(errors)
    sampled = settings.model.model_config.is_sample_acceleration
    return ExportSpec(
        layout,
        model_type,
        settings.export.weight_fp16,
        dtype,
        target,
        sampled,
        slots,
        length,
        rounded=rounded,
        key=key,
        ranks=ranks,
        vocab_parallel=settings.vocab_parallel,
    )


def spec_of_run(settings: ExportSettings, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """The export that serves a run of `slots` rows of `length` positions. Raises as `spec_of`."""
    asked = settings.infer.infer_seq_length
    check_length(length, asked)
    # Rounded up, so that prompts of other lengths find an artifact again.
    length = asked or cache_length(length, files.model.seq_length)
    return spec_of(settings, files, 1 << (slots - 1).bit_length(), length)


def check_length(length: int, asked: int | None) -> None:
    """Raises ConfigError where a run of `length` positions exceeds infer.infer_seq_length."""
    if asked is not None and length > asked:
        raise ConfigError(
            f"infer.infer_seq_length={asked}: the longest prompt and its new tokens need {length}",
            "ask for fewer new tokens, or a larger infer.infer_seq_length",
        )


def choose_layout(settings: ExportSettings, model: Decoder, target: Device) -> Layout:
    """The layout that export.layout names; of "auto", by target, engine and installed packages."""
    if settings.export.chosen_layout is not None:
        return settings.export.chosen_layout
    if settings.full_graph:
        return "full"
    if (
        target == "Ascend"
        or settings.model.model_config.is_sample_acceleration
        or settings.infer.prefill_model_path
        or settings.tensor_ranks > 1
    ):
        return "static_pair"
    if settings.chosen_engine == "graph-cell" or settings.infer.enc_key:
        return "static_pair"
    named = settings.chosen_engine is not None or settings.infer.model_type == "mindir_lite"
    if not_resizable(model) and not named:
        return "static_pair"
    errors = [why_unavailable(engine, "resizable", target) for engine in ENGINES["resizable"]]
    if named or None in errors:
        return "resizable"
    assert isinstance(errors[-1], EnvironmentFault)
    progress.note(f"engine=auto: graph-cell, since {errors[-1].message}")
    return "static_pair"


def layout_errors(layout: Layout, model: Decoder, dtype: DType, *, encrypted: bool) -> list[str]:
    """Validation errors of this layout for the model, computed in `dtype`."""
    if not fits_any(layout):
        return []
    errors = []
    if dtype != "float32":
        errors.append(f"export.layout=resizable computes in float32; got {dtype}")
    errors += [
        f"export.layout=resizable: {why}; take export.layout=static_pair"
        for why in not_resizable(model)
    ]
    if encrypted:
        errors.append("infer.enc_key needs export.layout=static_pair")
    return errors


def check_room(folder: Path, files: ModelFiles, spec: ExportSpec) -> None:
    """Raises EnvironmentFault where memory, or the disk of `folder`, does not suffice."""
    need = _weights_and_cache(files, spec)
    check_memory(export_need(need))
    graphs = 2 if is_pair(spec.layout) or spec.model_type == "mindir_lite" else 1
    require_space(folder, graphs * need.weights * BYTES_OF[spec.dtype] // BYTES_OF["float32"])


def _weights_and_cache(files: ModelFiles, spec: ExportSpec) -> Memory:
    """Memory of the network; a cache is in the graph where it is not fed."""
    cache = cache_bytes(files.model, "float32", spec.slots, spec.length)
    return Memory(float32_bytes(files.model), cache)
