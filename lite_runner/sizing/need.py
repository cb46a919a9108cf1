"""Memory requirements of a run, compared with the available memory before it starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import CacheType, Quantization, Scheme
from lite_runner.config.schema import DType, RunConfig
from lite_runner.errors import EnvironmentFault
from lite_runner.records import dataclass
from lite_runner.system import memory

BYTES_OF: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
PROCESS = 440 << 20  # Python with MindSpore, NumPy and the tokenizer
PROCESS_ADDRESSES = 2250 << 20  # reserved by MindSpore: libraries, threads, a pool of 1 GiB


@dataclass(frozen=True)
class Memory:
    """Memory requirements in bytes: on a device the first three, in a CPU process all."""

    weights: int
    cache: int  # KV cache of all slots
    adapters: int = 0  # the LoRA pool
    process: int = 0  # Python and MindSpore
    loading: int = 0  # peak beyond `weights` while these are loaded
    work: int = 0  # graphs, activations, logits

    @property
    def held(self) -> int:
        return self.weights + self.cache + self.adapters

    @property
    def total(self) -> int:
        """Peak: the weights are loaded before the cache is allocated."""
        used = self.cache + self.adapters + self.work
        return self.process + self.weights + max(self.loading, used)

    @property
    def addresses(self) -> int:
        """Address space that a process needs on top of what it has before importing MindSpore."""
        return self.total - self.process + PROCESS_ADDRESSES

    def parts(self) -> str:
        """The breakdown as text."""
        named = {
            "weights": self.weights,
            "cache": self.cache,
            "adapters": self.adapters,
            "the process": self.process,
            "graphs and steps": self.work,
            "more while loading": max(0, self.loading - self.cache - self.adapters - self.work),
        }
        return ", ".join(f"{name} {readable(size)}" for name, size in named.items() if size)


def parameter_count(model: Decoder) -> int:
    """The exact number of parameters; a tied head is counted once."""
    return sum(math.prod(one.shape) for one in parameters(model))


def float32_bytes(model: Decoder) -> int:
    """Bytes of the weights as float32."""
    return parameter_count(model) * BYTES_OF["float32"]


def matrix_parameters(model: Decoder) -> int:
    """Parameters of the linear layers of all blocks."""
    return sum(math.prod(one.shape) for one in parameters(model) if one.layout != "plain")


def weight_bytes(model: Decoder, dtype: DType, quantization: Quantization) -> int:
    """Bytes of the weights, quantized or not; approximate within 1 % for scales per row and float32
    tensors next to 16-bit matrices."""
    linear, table = quantization.linear, quantization.table
    if linear is None or table is None:
        return parameter_count(model) * BYTES_OF[dtype]
    heads = 1 if model.tie_word_embeddings else 2
    layers = matrix_parameters(model)
    rest = parameter_count(model) - layers - heads * model.vocab_size * model.hidden_size
    tables = heads * table.nbytes(model.vocab_size, model.hidden_size)
    return _as_rows(linear, layers, model.hidden_size) + tables + 4 * rest


def _as_rows(scheme: Scheme, count: int, columns: int) -> int:
    """Bytes of `count` weights in rows of `columns`."""
    return scheme.nbytes(count // columns, columns)


def cache_bytes(
    model: Decoder, dtype: DType, slots: int, length: int, kv_cache: CacheType = "fp32"
) -> int:
    """Bytes of keys and values for `slots` sequences of `length` tokens, computed in `dtype`."""
    heads = 2 * model.num_layers * model.n_kv_heads
    sizes = {"fp32": BYTES_OF[dtype] * model.head_dim, "fp16": 2 * model.head_dim}
    sizes["int8"] = model.head_dim + 4  # and a scale
    return slots * length * heads * sizes[kv_cache]


def memory_need(
    model: Decoder,
    dtype: DType,
    slots: int,
    length: int,
    use_past: bool = True,
    quantization: Quantization = Quantization(),  # noqa: B008  (frozen)
) -> Memory:
    """Bytes for weights of `dtype`, quantized by `quantization`, and for a cache of `slots`
    sequences of `length` tokens."""
    cache = cache_bytes(model, dtype, slots, length) if use_past else 0
    return Memory(weight_bytes(model, dtype, quantization), cache)


def export_need(need: Memory) -> Memory:
    """Memory for exporting a model with the weights and cache of `need`: network and graph each
    hold both; it is verified once the network is freed."""
    return replace(need, process=PROCESS, loading=need.weights + need.cache)


@dataclass(frozen=True)
class MemoryHint:
    """A setting that reduces the memory requirement."""

    setting: str  # as it is typed
    need: Memory

    def __str__(self) -> str:
        return f"{self.setting} would need {readable(self.need.total)}"


def check_memory(need: Memory, hints: Callable[[], Sequence[MemoryHint]] = list) -> None:
    """Raise EnvironmentFault if `need` exceeds this machine's available memory; `hints` is called
    only then."""
    found = shortage(need)
    if found is not None:
        raise EnvironmentFault(f"memory: the run {found}", memory_remedy(hints()))


def shortage(need: Memory, processes: int = 1) -> str | None:
    """How far `need` of each of some processes, this one among them, exceeds the free memory; None
    if it fits."""
    free = memory.free_memory() + min(memory.resident(), need.process)
    total = processes * need.total
    if total > free:
        return f"needs {readable(total)} ({need.parts()}), but {readable(free)} is free"
    left = memory.free_addresses()
    if left is not None and need.process and need.addresses > left:
        return (
            f"needs {readable(need.addresses)} of address space ({need.parts()}; what is reserved "
            f"counts), but ulimit -v leaves {readable(left)}"
        )
    return None


def memory_remedy(hints: Sequence[MemoryHint]) -> str:
    """Hint for insufficient memory."""
    settings = "; ".join(map(str, hints))
    return (
        settings + "; or " if settings else ""
    ) + "a smaller model, or more memory: the machine's, its container's, or what ulimit -v allows"


def memory_lines(need: Memory, hints: Callable[[], Sequence[MemoryHint]] = list) -> dict[str, str]:
    """The lines of dry_run=true about the memory of one process."""
    found = shortage(need)
    if found is not None:
        line = f"{found}: NOT enough: the run would be refused"
        return {"memory": line, "to fit": memory_remedy(hints())}
    free = readable(memory.free_memory() + min(memory.resident(), need.process))
    return {"memory": f"needs {readable(need.total)} ({need.parts()}), {free} is free: enough"}


def model_lines(config: RunConfig, model: Decoder, checkpoint: str) -> dict[str, str]:
    """The lines of dry_run=true about the model and its checkpoint."""
    kv = "" if model.n_kv_heads == model.num_heads else f" ({model.n_kv_heads} key/value)"
    experts = None if model.sparse is None else model.sparse.experts
    mixture = "" if experts is None else f" {experts.chosen} of {experts.count} experts a token,"
    return {
        "run mode": config.run_mode,
        "model": config.model_name,
        "architecture": f"{model.architecture}: {model.num_layers} layers, hidden"
        f" {model.hidden_size}, {model.num_heads} heads{kv},{mixture} vocabulary"
        f" {model.vocab_size}, context {model.seq_length}",
        "parameters": f"{parameter_count(model):,}",
        "checkpoint": checkpoint,
    }


def align(lines: Mapping[str, str]) -> list[str]:
    """Labels and values as aligned lines."""
    return [f"{name:<13} {value}" for name, value in lines.items()]


def readable(size: int) -> str:
    """A number of bytes for humans: 538.1 MB."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"
