"""backend=ms: MindSpore's operators, on every device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path

from lite_runner import architectures, progress
from lite_runner.architectures import custom_network
from lite_runner.architectures.quantization import OF_BLOCKS, is_narrow
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import (
    Backend,
    RunOptions,
    Seat,
    cache_length,
    chunk_length,
    rows_at_once,
    step_capacity,
    unchunked,
)
from lite_runner.config.sections import AscendSettings
from lite_runner.errors import EnvironmentFault
from lite_runner.model import ModelFiles
from lite_runner.sizing import BYTES_OF, PROCESS, Memory, cache_bytes, rank_parameters, weight_bytes
from lite_runner.system import environment, memory
from lite_runner.weights import LazyTensor
from lite_runner.weights.quantization.quantize import describe, describe_dtype
from lite_runner.weights.read_ahead import (
    QuantizedWeights,
    ReadAhead,
    loading_peak,
    mindspore_bytes,
)

MAX_HEAD_DIM = 256  # of MindSpore's PagedAttention
# Measured on CPU with MindSpore 2.10, of prefill and decode together: a constant, what each kind of
# layer adds, which is compiled once (but in a user's network), and each layer.
_GRAPHS, _KIND, _LAYER = 90 << 20, 10 << 20, 5 << 20
_TENSOR_PARALLEL = 60 << 20  # their collectives


class MindSpore(Seat):
    """See `lite_runner.backends.Seat`."""

    elastic = True

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        """See Seat. Raises EnvironmentFault where MindSpore is not installed, and for a `quant`
        that this machine's Ascend processors do not support."""
        settings, device, model = options.settings, options.device, files.model
        reasons = architectures.unsupported(model)
        if files.exported is not None:
            reasons.append(f"{files.exported.folder} is an exported model, without a checkpoint")
        native_only = {
            f"kv_cache={settings.kv_cache}": is_narrow(settings.kv_cache),
            "adapter_dtype=bf16": settings.adapter_dtype == "bf16",
            f"quant={settings.quant}": settings.quant in OF_BLOCKS,
            options.speculates: bool(options.speculates),
            "draft_model=": options.draft is not None,
        }
        reasons += [
            f"{setting} needs backend=native" for setting, given in native_only.items() if given
        ]
        if device == "Ascend" and settings.source.quantization.rounds and not _has_fused(options):
            raise EnvironmentFault(
                f"quant={settings.quant}: {environment.ascend_soc()} has no operators that multiply"
                " by integers; Atlas A2 and A3 have",
                "quant=none, or on this machine's processor with context.device_target=CPU",
            )
        wide = model.head_dim > MAX_HEAD_DIM and custom_network(model) is None
        wide = wide and settings.context.mode == 0  # pynative mode has MindSpore's plain attention
        if wide and settings.precision.computed(device) != "float32" and _has_fused(options):
            reasons.append(
                f"model.model_config.head_dim: got {model.head_dim}, but attention on Ascend takes"
                f" at most {MAX_HEAD_DIM}; model.model_config.compute_dtype=float32 takes other"
                " operators"
            )
        # A plan that names the backend may be for another machine.
        if not reasons and not (settings.dry_run and settings.backend == "ms"):
            environment.check_mindspore()
        return reasons

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        if options.device == "CPU":
            return _process_memory(files, options)
        settings, device, ranks = options.settings, options.device, options.ranks
        dtype = settings.precision.computed(device)
        if uses_integer_matmul(files, options):
            weights = weight_bytes(files.model, dtype, files.quantization)
        else:
            cut = settings.vocab_parallel
            count = rank_parameters(files.model, ranks.tensor, vocab_parallel=cut)
            weights = BYTES_OF[dtype] * count
        cached = 0
        if settings.use_past:
            local = files.model.shard(ranks.tensor)
            cached = cache_bytes(local, dtype, options.slots, options.length)
        return Memory(weights, cached, options.adapter_bytes(files.model))

    def profiled(self, folder: Path) -> AbstractContextManager[None]:
        """See Seat: MindSpore's profiler of its operators."""
        from lite_runner.backends.mindspore.device import profiled

        return profiled(folder / "mindspore_profile")

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        return f"MindSpore's operators on {options.device}"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        if uses_integer_matmul(files, options):
            return f"integers (quant={files.quantization})"
        return options.settings.precision.computed(options.device)

    def open(self, files: ModelFiles, options: RunOptions) -> Backend:
        from lite_runner.backends.mindspore.device import choose_device

        settings, device, ranks = options.settings, options.device, options.ranks
        choose_device(device, AscendSettings.of(settings.context))
        dtype, quantized = settings.precision.rounded(device), files.quantization.rounds
        if dtype != "float32":
            progress.note(describe_dtype(dtype, quantized=quantized))
        files = replace(files, rounded=dtype)
        tensors = files.tensors(ranks, vocab_parallel=settings.vocab_parallel)
        if quantized:
            progress.note(describe(tensors, files.quantization))
            if not uses_integer_matmul(files, options):
                progress.note("MindSpore's operators fall back to dequantized weights")
        name = f"load {files.path.name}" if files.path else "make random weights"
        if files.held is not None:
            name = "take the weights from the parameters"
        with progress.step(name, len(tensors), "tensors", phase="read") as step:
            return _opened(files, options, tensors, step.advance)


SEAT = MindSpore()


def uses_integer_matmul(files: ModelFiles, options: RunOptions) -> bool:
    """True if quantized weights are multiplied without dequantizing them."""
    settings, device = options.settings, options.device
    return (
        options.ranks.tensor == 1  # sharded weights are dequantized
        and files.quantization.rounds
        and settings.precision.computed(device) != "float32"
        and custom_network(files.model) is None
        and files.model.sparse is None
        and _has_fused(options)
    )


def _has_fused(options: RunOptions) -> bool:
    """True if the device has fused operators; a dry run for an absent Ascend processor assumes
    Atlas A2 or A3."""
    device = options.device
    absent = device == "Ascend" and options.settings.dry_run and not environment.ascend_devices()
    return absent or environment.has_fused_operators(device)


@memory.large_blocks_returned()
def _opened(
    files: ModelFiles,
    options: RunOptions,
    tensors: Mapping[str, LazyTensor],
    advance: Callable[[int], None],
) -> Backend:
    """The backend; weights are read while MindSpore is imported. `advance` is called with the
    number of tensors read."""
    settings = options.settings
    weights: ReadAhead | QuantizedWeights
    if uses_integer_matmul(files, options):
        weights = QuantizedWeights(tensors, files.model, advance)
    else:
        weights = ReadAhead(tensors, advance)
    try:
        environment.import_mindspore()
        _freeze_imports()
        from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions

        adapters, lora = options.rank_adapters(files.model)
        chosen = MindSporeOptions(
            slots=options.slots,
            length=options.length,
            dtype=settings.precision.computed(options.device),
            device=options.device,
            device_id=settings.context.device_id,
            threads=settings.context.threads,
            use_past=settings.use_past,
            pynative=settings.context.mode == 1,
            ranks=options.ranks,
            vocab_parallel=settings.vocab_parallel,
            lora=lora,
            # Of blocks nothing is rounded here, so that their graphs are those of floats.
            integer_input=files.quantization.rounds and files.quantization.rounds_inputs,
        )
        return MindSporeBackend(files.model, weights, chosen, adapters)
    finally:
        weights.close()


@cache
def _freeze_imports() -> None:
    """Exclude imported objects from the garbage collection that MindSpore runs at each compile.

    Once per process, so that models loaded later can still be collected.
    """
    gc.freeze()


def _process_memory(files: ModelFiles, options: RunOptions) -> Memory:
    settings, ranks, slots, length = options.settings, options.ranks, options.slots, options.length
    model = files.model
    local = model.shard(ranks.tensor)
    # The reader of their values verifies them.
    unread = replace(files, rounded=settings.precision.rounded("CPU"), verified=True)
    tensors = unread.tensors(ranks, vocab_parallel=settings.vocab_parallel)
    sizes = {name: mindspore_bytes(one, copied=slots > 1) for name, one in tensors.items()}
    weights = sum(one.resident for one in sizes.values())
    positions = cache_length(length, model.seq_length)
    kinds = local.num_layers if custom_network(local) else len(set(local.blocks))
    graphs = _GRAPHS + _KIND * kinds + _LAYER * local.num_layers
    if ranks.tensor > 1:
        graphs += _TENSOR_PARALLEL
    rows, cached = slots, 0
    if options.prompt_logits:
        longest = max(length, step_capacity(slots, unchunked(model, length)))
        rows = rows_at_once(model.vocab_size, longest) if settings.use_past else length
    if settings.use_past:
        cached = cache_bytes(local, "float32", slots, positions)
    steps = _step_bytes(local, slots, positions, length, settings.use_past)
    return Memory(
        weights,
        cached,
        options.adapter_bytes(model),
        process=PROCESS,
        loading=max(0, loading_peak(sizes) - weights),
        work=graphs + steps + 3 * 4 * rows * model.vocab_size,
    )


def _step_bytes(model: Decoder, slots: int, positions: int, length: int, use_past: bool) -> int:
    """Attention scores of a chunk, their mask, activations."""
    chunk = chunk_length(model.num_heads, positions, unchunked(model, length))
    tokens = min(length, chunk) if use_past else length
    keys = positions if use_past else length
    scores = max(tokens, slots) * model.num_heads * keys
    wide = 3 * model.intermediate_size + 8 * model.hidden_size
    if model.sparse is not None and model.sparse.experts is not None:  # all compute every token
        width = model.sparse.experts.count * model.sparse.width
        wide = max(wide, 4 * width + 8 * model.hidden_size)
    return 4 * (3 * scores + max(tokens, slots) * wide)
