"""What a run holds at its peak, from sizes alone: nothing is loaded, MindSpore is not imported.

What stands in the checkpoint is counted as it will be held. The rest was measured on CPU with
MindSpore 2.10: a process with it, its graphs by their layers, what steps work in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from lite_runner.architectures.spec import Decoder
from lite_runner.backends.step_sizes import (
    SMALLEST_CACHE,
    cache_length,
    chunk_length,
    step_capacity,
)
from lite_runner.config.options import ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.errors import RunnerError
from lite_runner.model.files import ModelFiles
from lite_runner.plan.operators import integers_serve, own_operators
from lite_runner.sizing.need import (
    BYTES_OF,
    PROCESS,
    Lever,
    Memory,
    cache_bytes,
    float32_bytes,
    weight_bytes,
)
from lite_runner.sizing.scaling import rank_parameters
from lite_runner.weights.read_ahead import AHEAD_BYTES
from lite_runner.weights.tensor import LazyTensor

MIB = 1 << 20
# Graphs: what the first takes, and what each layer adds to it.
OWN_GRAPH, OWN_LAYER = 24 * MIB, 3 * MIB // 2
STOCK_GRAPHS, STOCK_LAYER = 90 * MIB, 15 * MIB  # prefill and decode together
TENSOR_PARALLEL, TENSOR_PARALLEL_LAYER = 60 * MIB, 12 * MIB  # collectives beside those
HELPS = 0.95  # of what is needed: a setting that saves less is not worth naming
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class _Taken:
    """Bytes of one tensor on its way into a network."""

    making: int  # beside the result, while it is read
    ready: int  # as it waits to be packed
    held: int  # as it is computed with
    copied: bool  # whether the network makes its own of it; else it takes what is ready


def of_run(
    config: ComputeOptions,
    files: ModelFiles,
    ranks: Ranks,
    *,
    own: bool,
    slots: int,
    length: int,
    adapters: int = 0,
    logits: int,
) -> Memory:
    """Of one process that generates, or scores, online on a CPU: each of `ranks` with `slots` rows
    of `length` tokens. `own`: by this project's operators. `logits`: rows of them that a step
    gives."""
    local = files.model.shard(ranks.tensor)
    tensors = _tensors(config, files, ranks)
    quantized = files.quantization.quant != "none"
    taken = {
        name: _own(tensor, dequantize=not quantized) if own else _stock(tensor, by_column=slots > 1)
        for name, tensor in tensors.items()
    }
    weights = sum(one.held for one in taken.values())
    positions = cache_length(length, files.model.seq_length)
    if own:
        graphs = OWN_GRAPH + OWN_LAYER * local.num_layers
        steps = _own_steps(local, slots, positions, length)
    else:
        graphs = STOCK_GRAPHS + STOCK_LAYER * local.num_layers
        if ranks.tensor > 1:
            graphs += TENSOR_PARALLEL + TENSOR_PARALLEL_LAYER * local.num_layers
        steps = _stock_steps(local, slots, positions, length, config.use_past)
    cache = 0
    if config.use_past:
        cache = cache_bytes(local, "float32", slots, positions, config.kv_cache)
    return Memory(
        weights,
        cache,
        adapters,
        process=PROCESS,
        loading=max(0, _most_while_loading(taken) - weights),
        work=graphs + steps + 3 * 4 * logits * files.model.vocab_size,
    )


def on_device(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    ranks: Ranks,
    slots: int,
    length: int,
    adapters: int,
) -> Memory:
    """What one of `ranks` has on its device: weights, as MindSpore's operators take them there, a
    cache of `slots` rows of `length` tokens, and adapters."""
    local = files.model.shard(ranks.tensor)
    dtype = config.compute_dtype(device)
    if integers_serve(config, files, device, ranks):
        weights = weight_bytes(files.model, dtype, files.quantization)
    else:
        cut = config.vocab_parallel
        weights = BYTES_OF[dtype] * rank_parameters(files.model, ranks.tensor, vocab_parallel=cut)
    cache = cache_bytes(local, dtype, slots, length) if config.use_past else 0
    return Memory(weights, cache, adapters)


def of_exported(config: ComputeOptions, files: ModelFiles, slots: int, length: int) -> Memory:
    """Of a run through an exported model, all its processes together."""
    model = files.model
    weights = float32_bytes(model)
    positions = cache_length(length, model.seq_length)
    cache = cache_bytes(model, "float32", slots, positions)
    logits = 3 * 4 * slots * model.vocab_size
    return Memory(weights, cache, process=PROCESS, loading=weights, work=logits)


def dtype_of_plan(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> str:
    """As `held_as` for dry_run=true, which prints it; a run need not open the tensors for it."""
    if config.dry_run:
        return held_as(config, files, device, ranks)
    return config.compute_dtype(device)


def held_as(config: ComputeOptions, files: ModelFiles, device: str, ranks: Ranks) -> str:
    """What the weights are held as, in words."""
    own = device == "CPU" and own_operators(config, files, device, ranks)
    quantized = files.quantization.quant != "none"
    if quantized and (own or integers_serve(config, files, device, ranks)):
        return f"integers (quant={files.quantization})"
    if not own or files.given is not None:
        return config.compute_dtype(device)
    tensors = _tensors(config, files, ranks).values()
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    found = {names[tensor.dtype] for tensor in tensors if len(tensor.shape) > 1}
    return " and ".join(sorted(found))


def _tensors(config: ComputeOptions, files: ModelFiles, ranks: Ranks) -> Mapping[str, LazyTensor]:
    files = replace(files, rounded=config.rounded_dtype("CPU"))
    return files.tensors(ranks, vocab_parallel=config.vocab_parallel)


@dataclass(frozen=True)
class Change:
    """A setting that may make a run smaller, and what the run then is."""

    setting: str
    config: ComputeOptions
    files: ModelFiles
    one_at_a_time: bool = False
    half_as_long: bool = False


def levers(
    config: ComputeOptions,
    files: ModelFiles,
    need: Callable[[Change], Memory],
    *,
    own: bool,
    slots: int,
    length: int,
) -> list[Lever]:
    """The changes that help, those first that help most; `need` tells what each would take."""
    now = need(Change("", config, files)).total
    found = []
    for change in _changes(config, files, own=own, slots=slots, length=length):
        try:
            then = need(change)
        except RunnerError:  # such as groups that do not divide a matrix
            continue
        if then.total < HELPS * now:
            found.append(Lever(change.setting, then))
    return sorted(found, key=lambda lever: lever.need.total)


def _changes(
    config: ComputeOptions, files: ModelFiles, *, own: bool, slots: int, length: int
) -> Iterator[Change]:
    if own and files.given is None and files.quantization.quant == "none":
        for quant in ("a16w8", "a16w4"):
            asked = replace(config, quant=quant)
            yield Change(f"quant={quant}", asked, replace(files, quantization=asked.quantization))
        if config.rounded_dtype("CPU") == "float32":
            settings = replace(config.model.model_config, compute_dtype="float16")
            half = replace(config, model=replace(config.model, model_config=settings))
            yield Change("model.model_config.compute_dtype=float16", half, files)
    if own and config.kv_cache != "int8":
        yield Change("kv_cache=int8", replace(config, kv_cache="int8"), files)
    if slots > 1:
        yield Change("predict_batch_size=1", config, files, one_at_a_time=True)
    if length > 2 * SMALLEST_CACHE:
        yield Change(f"max_length={length // 2}", config, files, half_as_long=True)


def _own(tensor: LazyTensor, *, dequantize: bool) -> _Taken:
    """As our own operators pack it: integers, 16 bits or float32."""
    count = math.prod(tensor.shape)
    if tensor.integers is not None:
        ready = tensor.integers.scheme.nbytes(*tensor.shape[-2:])
        making = 0 if tensor.integers.stored or tensor.part is not None else 4 * count
        return _Taken(making, ready, 4 * count if dequantize else ready, True)
    if len(tensor.shape) == 1:
        return _Taken(0, 4 * count, 4 * count, True)
    return _Taken(_making(tensor), tensor.nbytes, tensor.nbytes, True)


def _stock(tensor: LazyTensor, *, by_column: bool) -> _Taken:
    """As MindSpore's operators take it on a CPU: float32."""
    size = 4 * math.prod(tensor.shape)
    integers, making = tensor.integers, _making(tensor)
    if integers is not None:
        making = integers.scheme.nbytes(*tensor.shape[-2:])
    if tensor.dtype != "F32":
        making += tensor.nbytes
    return _Taken(making, size, size, by_column and len(tensor.shape) > 1)


def _making(tensor: LazyTensor) -> int:
    """Bytes beside the stored ones, for what is rounded whole: it has no parts."""
    rounded = tensor.part is None and tensor.dtype != "F32"
    return 4 * math.prod(tensor.shape) if rounded else 0


def _most_while_loading(taken: Mapping[str, _Taken]) -> int:
    """The most that is held of all tensors while they are read, in their order, and packed a layer
    at a time; a layer's own are let go when it is packed, and some are read ahead."""
    layers = [list(some) for _, some in groupby(taken.items(), lambda item: _layer_of(item[0]))]
    most = packed = 0
    waiting = [one for layer in layers for _, one in layer]
    for layer in layers:
        mine = [one for _, one in layer]
        del waiting[: len(mine)]
        sources = sum(one.ready for one in mine if one.copied)
        making = max((one.making for one in waiting[:2]), default=0)  # two threads read
        most = max(most, packed + max(one.making + one.ready for one in mine))
        packed += sum(one.held for one in mine)
        largest = max(one.ready for one in mine)
        ahead = min(sum(one.ready for one in waiting), max(0, AHEAD_BYTES - largest))
        most = max(most, packed + sources + ahead + making)
    return most


def _layer_of(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else name


def _own_steps(model: Decoder, slots: int, positions: int, length: int) -> int:
    """What our operators keep between steps: hidden states of the step's capacity, of the tokens
    that it has the inputs and outputs of a layer, and parts of attention."""
    tokens = min(step_capacity(slots), slots * length)
    wide = 2 * model.intermediate_size + 4 * model.hidden_size
    return 4 * (3 * step_capacity(slots) * model.hidden_size + tokens * wide)


def _stock_steps(model: Decoder, slots: int, positions: int, length: int, use_past: bool) -> int:
    """What MindSpore's operators work in: scores of a chunk, their bias, and a layer's outputs."""
    tokens = min(length, chunk_length(model.num_heads, positions)) if use_past else length
    keys = positions if use_past else length
    scores = max(tokens, slots) * model.num_heads * keys
    wide = 3 * model.intermediate_size + 8 * model.hidden_size
    return 4 * (3 * scores + max(tokens, slots) * wide)
