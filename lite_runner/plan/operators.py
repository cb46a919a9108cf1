"""Which operators compute a run online: the native ones (CPU), or MindSpore's (any device)."""

from __future__ import annotations

from lite_runner import native, progress
from lite_runner.architectures import custom_network, limits
from lite_runner.config.options import ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ConfigError, EnvironmentFault
from lite_runner.model.files import ModelFiles
from lite_runner.native.packed_model import unsupported
from lite_runner.records import dataclass
from lite_runner.system import environment
from lite_runner.weights.quantization import rounding

MAX_HEAD_DIM = 256  # of MindSpore's PagedAttention


@dataclass(frozen=True)
class _Fallback:
    """Why the native operators are not used, and how to enable them."""

    why: str
    remedy: str


def _native_fallback(
    config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks
) -> _Fallback | None:
    """None where the native operators are used."""
    if device != "CPU":
        return _Fallback(f"{device} has operators of its own", "context.device_target=CPU")
    if not config.context.kernels:
        return _Fallback("context.kernels=false", "context.kernels=true")
    if config.context.mode == 1:
        return _Fallback("context.mode=1 runs them one by one (pynative)", "context.mode=0")
    if fault := native.unusable():
        return _Fallback(f"they {fault.why}", fault.remedy)
    if not config.use_past:
        return _Fallback("use_past=false", "model.model_config.use_past=true")
    if reasons := unsupported(files.model):
        return _Fallback("; ".join(reasons), "a model that they compute, such as a Llama")
    if ranks.tensor > 1:
        return _Fallback(
            "several ranks share the model",
            "one process (use_parallel=false), or a copy of the model for each (parallel=dp2)",
        )
    return None


def uses_native_operators(
    config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks
) -> bool:
    """Whether the native operators are used; unlike `resolve_operators`, without notes."""
    return _native_fallback(config, files, device, ranks) is None


def operators_line(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> str:
    """The operators of an online run, and the reason, as text."""
    fallback = _native_fallback(config, files, device, ranks)
    return "lite-runner's own" if fallback is None else f"MindSpore's: {fallback.why}"


def uses_integer_matmul(
    config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks
) -> bool:
    """Whether MindSpore's operators use quantized weights without dequantizing them; a dry run for
    an absent Ascend processor assumes Atlas A2 or A3."""
    absent = device == "Ascend" and config.dry_run and not environment.ascend_devices()
    return (
        ranks.tensor == 1  # sharded weights are dequantized
        and files.quantization.rounds
        and config.compute_dtype(device) != "float32"
        and custom_network(files.model) is None
        and files.model.sparse is None
        and (absent or environment.has_fused_operators(device))
    )


def check_supported(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> None:
    """Raises ConfigError for a model or an option that the operators do not support, and
    EnvironmentFault for a `quant` that this machine's Ascend processors do not support."""
    if config.backend == "mindformers":
        raise ConfigError(
            "backend=mindformers completes prompts by itself and gives no logits to work with",
            "run_mode=predict, or backend=ms",
        )
    if reasons := limits.unsupported(files.model):
        raise ConfigError(
            f"{files.model.architecture}: neither MindSpore's operators nor this project's own can"
            f" compute the model: {'; '.join(reasons)}"
        )
    native_only = {
        "kv_cache=fp32": config.kv_cache != "fp32",
        "adapter_dtype=auto": getattr(config, "adapter_dtype", "auto") != "auto",  # eval has none
        "quant=null": config.quant == "a8",
    }
    for instead, wanted in native_only.items():
        if wanted and (fallback := _native_fallback(config, files, device, ranks)):
            key, _, _ = instead.partition("=")
            raise ConfigError(
                f"{key}={getattr(config, key)} needs this project's own operators, which do not "
                f"serve here: {fallback.why}",
                f"{fallback.remedy}; or {instead}",
            )
    fused, model = environment.has_fused_operators, files.model
    if device == "Ascend" and config.quantization.rounds and not fused(device):
        raise EnvironmentFault(
            f"quant={config.quant}: {environment.ascend_soc()} has no operators that multiply by"
            " integers; Atlas A2 and A3 have",
            "quant=none, or on this machine's processor with context.device_target=CPU",
        )
    wide = model.head_dim > MAX_HEAD_DIM and custom_network(model) is None
    if wide and config.compute_dtype(device) != "float32" and fused(device):
        raise ConfigError(
            f"model.model_config.head_dim: got {model.head_dim}, but attention on Ascend takes at"
            f" most {MAX_HEAD_DIM}",
            "model.model_config.compute_dtype=float32, which takes other operators; or"
            " context.device_target=CPU",
        )


def resolve_operators(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> bool:
    """Whether the native operators compute this run; notes why not, and what would help. Raises as
    `check_supported`."""
    check_supported(config, files, device, ranks)
    quantized, dtype = files.quantization.rounds, config.rounded_dtype(device)
    fallback = _native_fallback(config, files, device, ranks)
    if dtype != "float32" and (fallback or quantized):
        progress.note(rounding.describe(dtype, quantized=quantized))
    if fallback is None:
        return True
    if device == "CPU" and config.context.kernels:
        progress.note(
            f"MindSpore's operators compute, not this project's: {fallback.why} -> "
            f"{fallback.remedy}"
        )
    if quantized and not uses_integer_matmul(config, files, device, ranks):
        progress.note("MindSpore's operators fall back to dequantized weights")
    return False
