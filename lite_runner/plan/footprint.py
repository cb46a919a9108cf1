"""Peak memory of a run, estimated from sizes: nothing is loaded, MindSpore is not imported.

Weights are counted from the checkpoint's headers. The constants of processes, graphs and steps were
measured on CPU with MindSpore 2.10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.step_sizes import (
    SMALLEST_CACHE,
    cache_length,
    chunk_length,
    step_capacity,
    unchunked,
)
from lite_runner.config.options import ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.errors import RunnerError
from lite_runner.export.memory import packed_weights
from lite_runner.model.files import ModelFiles
from lite_runner.plan.operators import uses_integer_matmul, uses_native_operators
from lite_runner.records import dataclass
from lite_runner.sizing.need import (
    BYTES_OF,
    PROCESS,
    Memory,
    MemoryHint,
    cache_bytes,
    float32_bytes,
    weight_bytes,
)
from lite_runner.sizing.scaling import rank_parameters
from lite_runner.weights.tensor import LazyTensor
from lite_runner.weights.tensor_bytes import loading_peak, mindspore_bytes, native_bytes

MIB = 1 << 20
# Graphs: a constant, and what each layer adds.
NATIVE_GRAPH, NATIVE_LAYER = 24 * MIB, 3 * MIB // 2
NATIVE_PROCESS = 110 * MIB  # Python with NumPy, the tokenizer and Hydra
MINDSPORE_GRAPHS, MINDSPORE_LAYER = 90 * MIB, 15 * MIB  # prefill and decode together
TENSOR_PARALLEL, TENSOR_PARALLEL_LAYER = 60 * MIB, 12 * MIB  # their collectives
WORTHWHILE = 0.95  # a hint must save 5 % at least


def process_memory(
    config: ComputeOptions,
    files: ModelFiles,
    ranks: Ranks,
    *,
    native: bool,
    slots: int,
    length: int,
    adapters: int = 0,
    logits: int,
) -> Memory:
    """Memory of one CPU process that computes online, for `slots` rows of `length` tokens.

    `native`: by this project's operators; `adapters`: bytes of the LoRA pool; `logits`: rows of
    logits that a step returns.
    """
    local = files.model.shard(ranks.tensor)
    tensors = _tensors(config, files, ranks)
    dequantize = files.quantization.quant == "none"
    tensor_bytes = {
        name: native_bytes(tensor, dequantize=dequantize)
        if native
        else mindspore_bytes(tensor, copied=slots > 1)
        for name, tensor in tensors.items()
    }
    weights = sum(one.resident for one in tensor_bytes.values())
    positions = cache_length(length, files.model.seq_length)
    if native:
        graphs = NATIVE_GRAPH + NATIVE_LAYER * local.num_layers
        steps = _native_step_bytes(local, slots, length)
    else:
        graphs = MINDSPORE_GRAPHS + MINDSPORE_LAYER * local.num_layers
        if ranks.tensor > 1:
            graphs += TENSOR_PARALLEL + TENSOR_PARALLEL_LAYER * local.num_layers
        steps = _mindspore_step_bytes(local, slots, positions, length, config.use_past)
    cache = 0
    if config.use_past:
        cache = cache_bytes(local, "float32", slots, positions, config.kv_cache)
    return Memory(
        weights,
        cache,
        adapters,
        process=PROCESS,
        loading=max(0, loading_peak(tensor_bytes) - weights),
        work=graphs + steps + 3 * 4 * logits * files.model.vocab_size,
    )


def device_memory(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    ranks: Ranks,
    slots: int,
    length: int,
    adapters: int,
) -> Memory:
    """Memory of one rank on its device: weights, a KV cache of `slots` rows of `length` tokens, and
    `adapters` bytes of adapters."""
    local = files.model.shard(ranks.tensor)
    dtype = config.compute_dtype(device)
    if uses_integer_matmul(config, files, device, ranks):
        weights = weight_bytes(files.model, dtype, files.quantization)
    else:
        cut = config.vocab_parallel
        weights = BYTES_OF[dtype] * rank_parameters(files.model, ranks.tensor, vocab_parallel=cut)
    cache = cache_bytes(local, dtype, slots, length) if config.use_past else 0
    return Memory(weights, cache, adapters)


def exported_memory(config: ComputeOptions, files: ModelFiles, slots: int, length: int) -> Memory:
    """Memory of a run of an exported model, Lite's worker process included."""
    model = files.model
    weights = float32_bytes(model)
    positions = cache_length(length, model.seq_length)
    cache = cache_bytes(model, "float32", slots, positions)
    logits = 3 * 4 * slots * model.vocab_size
    return Memory(weights, cache, process=PROCESS, loading=weights, work=logits)


def packed_memory(
    config: ComputeOptions, files: ModelFiles, slots: int, length: int, adapters: int, logits: int
) -> Memory:
    """Memory of a run of packed layers, whose file is mapped, or packed and verified first.
    `adapters`: bytes of the LoRA pool; `logits`: rows of logits that a step returns."""
    model = files.model
    if files.exported is None:
        weights = packed_weights(replace(files, rounded=config.rounded_dtype("CPU")))
    else:
        weights = files.exported.nbytes
    positions = cache_length(length, model.seq_length)
    return Memory(
        weights,
        cache_bytes(model, "float32", slots, positions, config.kv_cache),
        adapters,
        process=NATIVE_PROCESS,
        loading=weights if files.exported is None else 0,
        work=_native_step_bytes(model, slots, length) + 2 * 4 * logits * model.vocab_size,
    )


def planned_dtype(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> str:
    """`weights_dtype` with dry_run=true, which prints it; else without opening tensors."""
    if config.dry_run:
        return weights_dtype(config, files, device, ranks)
    return config.compute_dtype(device)


def weights_dtype(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> str:
    """The dtype of the weights in memory, or their quantization, as text."""
    native = device == "CPU" and uses_native_operators(config, files, device, ranks)
    quantized = files.quantization.rounds
    if quantized and (native or uses_integer_matmul(config, files, device, ranks)):
        return f"integers (quant={files.quantization})"
    if not native or files.exported is not None:
        return config.compute_dtype(device)
    tensors = _tensors(config, files, ranks).values()
    types = sorted({tensor.own.type_name for tensor in tensors if tensor.own})
    if types:
        return f"{', '.join(types)} as the file has them"
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    found = {names[tensor.dtype] for tensor in tensors if len(tensor.shape) > 1}
    return " and ".join(sorted(found))


def _tensors(config: ComputeOptions, files: ModelFiles, ranks: Ranks) -> Mapping[str, LazyTensor]:
    # Whoever reads their values verifies them.
    files = replace(files, rounded=config.rounded_dtype("CPU"), verified=True)
    return files.tensors(ranks, vocab_parallel=config.vocab_parallel)


@dataclass(frozen=True)
class Change:
    """A setting that may reduce memory, and the run with it."""

    setting: str
    config: ComputeOptions
    files: ModelFiles
    single_row: bool = False
    half_length: bool = False


def hints(
    config: ComputeOptions,
    files: ModelFiles,
    need: Callable[[Change], Memory],
    *,
    native: bool,
    slots: int,
    length: int,
) -> list[MemoryHint]:
    """Settings that reduce memory, the most effective first; `need` computes that of a change."""
    now = need(Change("", config, files)).total
    found = []
    for change in _changes(config, files, native=native, slots=slots, length=length):
        try:
            then = need(change)
        except RunnerError:  # e.g. quant_group does not divide a matrix
            continue
        if then.total < WORTHWHILE * now:
            found.append(MemoryHint(change.setting, then))
    return sorted(found, key=lambda hint: hint.need.total)


def _changes(
    config: ComputeOptions, files: ModelFiles, *, native: bool, slots: int, length: int
) -> Iterator[Change]:
    if native and files.exported is None and not files.quantization.rounds:
        for quant in ("a16w8", "a16w4"):
            changed = replace(config, quant=quant)
            quantized = replace(files, quantization=changed.quantization)
            yield Change(f"quant={quant}", changed, quantized)
        if config.rounded_dtype("CPU") == "float32":
            settings = replace(config.model.model_config, compute_dtype="float16")
            half = replace(config, model=replace(config.model, model_config=settings))
            yield Change("model.model_config.compute_dtype=float16", half, files)
    if native and config.kv_cache != "int8":
        yield Change("kv_cache=int8", replace(config, kv_cache="int8"), files)
    if slots > 1:
        yield Change("predict_batch_size=1", config, files, single_row=True)
    if length > 2 * SMALLEST_CACHE:
        yield Change(f"max_length={length // 2}", config, files, half_length=True)


def _native_step_bytes(model: Decoder, slots: int, length: int) -> int:
    """Buffers of the native operators: hidden states at step capacity, a layer's activations for
    the tokens of a step, and partial results of attention."""
    capacity = step_capacity(slots, unchunked(model, length))
    tokens = min(capacity, slots * length)
    wide = 2 * model.intermediate_size + 4 * model.hidden_size
    if model.sparse is not None and model.sparse.experts is not None:
        # Each expert's inputs, activations and outputs.
        inner = 2 * model.sparse.width + 3 * model.hidden_size
        wide = max(wide, model.sparse.experts.chosen * inner + 4 * model.hidden_size)
    return 4 * (3 * capacity * model.hidden_size + tokens * wide)


def _mindspore_step_bytes(
    model: Decoder, slots: int, positions: int, length: int, use_past: bool
) -> int:
    """Buffers of MindSpore's operators: attention scores of a chunk, their mask, activations."""
    chunk = chunk_length(model.num_heads, positions, unchunked(model, length))
    tokens = min(length, chunk) if use_past else length
    keys = positions if use_past else length
    scores = max(tokens, slots) * model.num_heads * keys
    wide = 3 * model.intermediate_size + 8 * model.hidden_size
    if model.sparse is not None and model.sparse.experts is not None:  # all compute every token
        width = model.sparse.experts.count * model.sparse.width
        wide = max(wide, 4 * width + 8 * model.hidden_size)
    return 4 * (3 * scores + max(tokens, slots) * wide)
