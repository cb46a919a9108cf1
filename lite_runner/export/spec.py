"""What an export has to be: as its config asks, or as the run that needs it."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

from lite_runner.backends.engines.start import Device, check_operators
from lite_runner.backends.step_sizes import cache_length, step_capacity, unchunked
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import ExportedOptions
from lite_runner.config.schema import DType
from lite_runner.errors import ConfigError
from lite_runner.export.engine import device_of, key_of
from lite_runner.export.layout import choose_layout, layout_faults
from lite_runner.mindir.manifest import Layout, Operators, fits_any
from lite_runner.model.files import ModelFiles
from lite_runner.native import packed_model
from lite_runner.native.versions import FORMAT
from lite_runner.records import dataclass


@dataclass(frozen=True)
class ExportSpec:
    """What an exported model has to be."""

    layout: Layout
    model_type: Literal["mindir", "mindir_lite", "packed"]
    weight_fp16: bool
    dtype: DType  # of the graph; weight_fp16 is only how a .ms stores its weights
    target: Device
    sampled: bool  # it ends in the likeliest token
    slots: int
    length: int  # positions of a slot
    operators: Operators | None = None  # of quantized weights
    rounded: DType = "float32"  # matrices are rounded to it, and computed with in `dtype`
    key: bytes | None = field(default=None, repr=False)
    ranks: int = 1  # tensor parallel, each with graphs of its own
    vocab_parallel: bool = True  # with several ranks: the embedding and the head are split too

    @property
    def fits_any(self) -> bool:
        """See Manifest.fits_any."""
        return fits_any(self.layout)

    @property
    def precision(self) -> DType:
        return "float16" if self.weight_fp16 else self.dtype


def spec_of(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """The export that the config asks for; what it leaves open is as the first engine here runs it.

    Raises ConfigError for what does not go together, EnvironmentFault where an engine was asked for
    that is not here, or this project's operators are not, which quantized weights need.
    """
    if config.export.layout == "packed" or config.engine == "native":
        return _packed(config, files, slots, length)
    if files.quantization.rounds:
        return _quantized(config, files, slots, length)
    key, device = key_of(config), device_of(config)
    target = device if config.export.target == "auto" else config.export.target
    layout = choose_layout(config, files.model, target)
    model_type = config.infer.model_type
    if model_type is None:
        # A .ms loads in a fraction of a MindIR's time; run_mode=export writes what others can read.
        to_run = config.run_mode != "export" or config.export.weight_fp16
        model_type = "mindir_lite" if layout == "resizable" and to_run else "mindir"
    dtype, rounded = config.compute_dtype(target), config.rounded_dtype(target)
    ranks = ranks_of(config).tensor
    faults = []
    if config.export.weight_fp16 and model_type != "mindir_lite":
        faults.append("export.weight_fp16=true needs infer.model_type=mindir_lite")
    faults += layout_faults(layout, files.model, dtype, encrypted=key is not None)
    if dtype == "bfloat16":
        faults.append(
            "an export in bfloat16 cannot be verified on a CPU; float16 or float32 can be"
        )
    if config.kv_cache != "fp32":
        faults.append(f"kv_cache={config.kv_cache} of an export needs quantized weights: quant=")
    if ranks > 1 and key is not None and target != device:
        faults.append(f"infer.enc_key with several ranks needs the target device ({target}) here")
    if faults:
        raise ConfigError.of(faults)
    sampled = config.model.model_config.is_sample_acceleration
    return ExportSpec(
        layout,
        model_type,
        config.export.weight_fp16,
        dtype,
        target,
        sampled,
        slots,
        length,
        rounded=rounded,
        key=key,
        ranks=ranks,
        vocab_parallel=config.vocab_parallel,
    )


def spec_of_run(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """The export that serves a run of `slots` rows of `length` positions. Raises as `spec_of`."""
    asked = config.infer.infer_seq_length
    check_length(length, asked)
    # Rounded up, so that prompts of other lengths find an artifact again.
    length = asked or cache_length(length, files.model.seq_length)
    return spec_of(config, files, 1 << (slots - 1).bit_length(), length)


def check_length(length: int, asked: int | None) -> None:
    """Raises ConfigError where a run of `length` positions exceeds infer.infer_seq_length."""
    if asked is not None and length > asked:
        raise ConfigError(
            f"infer.infer_seq_length={asked}: the longest prompt and its new tokens need {length}",
            "ask for fewer new tokens, or a larger infer.infer_seq_length",
        )


def _quantized(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """Of quantized weights; the config's checks have refused what they do not go with."""
    device, quantization = device_of(config), files.quantization
    what = f"quant={quantization}"
    _check_native(
        config, files, device, f"an export of {what}", f"{what} is not available in an export"
    )
    # FORMAT is the newest; the export says which its layers have.
    capacity = step_capacity(slots, unchunked(files.model, length))
    operators = Operators(FORMAT, quantization.quant, quantization.group, config.kv_cache, capacity)
    rounded = config.rounded_dtype(device)
    return ExportSpec(
        "dynamic", "mindir", False, "float32", "CPU", False, slots, length, operators, rounded
    )


def _packed(config: ExportedOptions, files: ModelFiles, slots: int, length: int) -> ExportSpec:
    """Of packed layers, for runs of any sizes and any kv_cache."""
    device, quantization = device_of(config), files.quantization
    what = "export.layout=packed"
    _check_native(config, files, device, what, f"{what} is not available")
    if config.export.target == "Ascend" or key_of(config) is not None:
        raise ConfigError(f"{what} is for the CPU, and is not encrypted")
    rounded = config.rounded_dtype(device)
    operators = Operators(
        FORMAT,
        quantization.quant,
        quantization.group,
        "fp32",
        step_capacity(1),
        bfloat16_input=replace(files, rounded=rounded).bfloat16_input,
    )
    return ExportSpec(
        "packed", "packed", False, "float32", "CPU", False, slots, length, operators, rounded
    )


def _check_native(
    config: ExportedOptions, files: ModelFiles, device: Device, what: str, unavailable: str
) -> None:
    """Raise ConfigError, EnvironmentFault where `what` cannot be of the native kernels."""
    faults = []
    dtype = config.compute_dtype(device)
    if dtype != "float32":
        faults.append(f"{what} computes in float32; got {dtype}")
    faults += [f"{unavailable}: {why}" for why in packed_model.unsupported(files.model)]
    if ranks_of(config).tensor > 1:
        faults.append(f"{what} is of one rank: model_parallel=1")
    if not config.context.kernels:
        faults.append(f"{what} needs context.kernels=true")
    if faults:
        raise ConfigError.of(faults)
    check_operators(what, device)
