"""Memory estimates in bytes, and a roofline estimate of tensor parallelism.

A decode step of a rank reads its weights and KV cache once, all-reduces the hidden state twice per
layer and once after the embedding, and all-gathers the logits, each at the assumed bandwidth.
Arithmetic, operator launches and sampling are left out: real steps take longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import CacheType, Quantization, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.config.parallel import not_divided
from lite_runner.config.sections import Cluster, DType
from lite_runner.errors import EnvironmentFault, shown
from lite_runner.records import dataclass
from lite_runner.system import memory
from lite_runner.system.files import readable

BYTES_OF: dict[DType, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
PROCESS = 440 << 20  # Python with MindSpore, NumPy and the tokenizer
MSRUN_PROCESS = 450 << 20  # each process under msrun, with MindSpore imported; measured
ROOM = 0.9  # of the free memory, for what a run with chosen sizes holds
PROCESS_ADDRESSES = 2250 << 20  # reserved by MindSpore: libraries, threads, a pool of 1 GiB


@dataclass(frozen=True)
class Memory:
    """Memory requirements in bytes: on a device the first three, in a CPU process all."""

    weights: int
    cache: int  # KV cache: of all slots, or what a run cannot do without
    adapters: int = 0  # the LoRA pool
    process: int = 0  # Python and MindSpore
    loading: int = 0  # peak beyond `weights` while these are loaded
    work: int = 0  # graphs, activations, logits
    more_cache: int = 0  # of all slots in full, taken as far as memory is free

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
        """Address space that a process needs in addition to that before importing MindSpore."""
        return self.total + self.more_cache - self.process + PROCESS_ADDRESSES

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
        parts = [f"{name} {readable(size)}" for name, size in named.items() if size]
        if self.more_cache:
            parts.append(f"up to {readable(self.more_cache)} more cache where it is free")
        return ", ".join(parts)


def parameter_count(model: Decoder) -> int:
    """The exact number of parameters; a tied head is counted once."""
    return sum(math.prod(one.shape) for one in parameters(model))


def float32_bytes(model: Decoder) -> int:
    return parameter_count(model) * BYTES_OF["float32"]


def weight_bytes(model: Decoder, dtype: DType, quantization: Quantization) -> int:
    """Bytes of the weights, quantized or not; approximate for float32 tensors next to 16-bit
    matrices."""
    if not quantization.rounds:
        return parameter_count(model) * BYTES_OF[dtype]
    wanted, total = schemes(model, quantization), 0
    for one in parameters(model):
        if (scheme := wanted.get(one.name)) is None:
            total += 4 * math.prod(one.shape)
        else:
            total += scheme.nbytes(*(one.shape[::-1] if one.transposed else one.shape))
    return total


def cache_bytes(
    model: Decoder,
    dtype: DType,
    slots: int,
    length: int,
    kv_cache: CacheType = "fp32",
    windowed: int | None = None,
) -> int:
    """Bytes of keys and values for `slots` sequences of `length` tokens, computed in `dtype`;
    `windowed`: tokens that layers with a window keep of them; None: all."""
    size, scale = {"fp32": (BYTES_OF[dtype], 0), "fp16": (2, 0), "int8": (1, 4)}[kv_cache]
    total = 0
    for one in model.cached:
        kept = length if windowed is None or one.most_seen is None else windowed
        total += kept * 2 * one.kv_heads * (size * one.head_dim + scale)
    return slots * total


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


def cache_limit(need: Memory) -> int | None:
    """Bytes that the KV cache of a run may take of the free memory; None: all of it fits."""
    left = int(ROOM * free_for(need)) - need.total
    return None if left >= need.more_cache else need.cache + max(0, left)


def free_for(need: Memory) -> int:
    """Bytes that this process may take, including those that it has."""
    return memory.free_memory() + min(memory.resident(), need.process)


def free_text() -> str:
    """The free memory, or the rest of a smaller limit."""
    free, left = memory.free_memory(), memory.free_addresses()
    if left is not None and left < free:
        return f"{readable(left)} that ulimit -v leaves"
    return f"{readable(free)} of free memory"


def shortage(need: Memory, room: float = 1.0) -> str | None:
    """The need of this process that is beyond the share `room` of the free memory, as text; None if
    it fits."""
    free = int(room * free_for(need))
    if need.total > free:
        return f"needs {readable(need.total)} ({need.parts()}), but {readable(free)} is free"
    left = memory.free_addresses()
    if left is not None and need.process and need.addresses > int(room * left):
        return (
            f"needs {readable(need.addresses)} of address space ({need.parts()}; what is reserved "
            f"counts), but ulimit -v leaves {readable(left)}"
        )
    return None


def memory_remedy(hints: Sequence[MemoryHint]) -> str:
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
    free = readable(free_for(need))
    return {"memory": f"needs {readable(need.total)} ({need.parts()}), {free} is free: enough"}


def model_lines(run_mode: str, name: str, model: Decoder, checkpoint: str) -> dict[str, str]:
    """The lines of dry_run=true about the model and its checkpoint."""
    kv = "" if model.n_kv_heads == model.num_heads else f" ({model.n_kv_heads} key/value)"
    experts = None if model.sparse is None else model.sparse.experts
    mixture = "" if experts is None else f" {experts.chosen} of {experts.count} experts a token,"
    return {
        "run mode": run_mode,
        "model": name,
        "architecture": f"{model.architecture}: {model.num_layers} layers, hidden"
        f" {model.hidden_size}, {model.num_heads} heads{kv},{mixture} vocabulary"
        f" {model.vocab_size}, context {model.seq_length}",
        "parameters": f"{parameter_count(model):,}",
        "checkpoint": checkpoint,
    }


def align(lines: Mapping[str, str]) -> list[str]:
    """Labels and values as aligned lines."""
    return [f"{name:<13} {shown(value)}" for name, value in lines.items()]


DEGREES = range(1, 9)


@dataclass(frozen=True)
class Assumptions:
    """One device and the links of a server, in bytes, bytes/s and seconds."""

    memory_bytes: float = 64e9
    memory_rate: float = 1.6e12
    link_rate: float = 28e9  # of one device to the others, each way
    call_s: float = 20e-6  # latency of a collective

    def __str__(self) -> str:
        return (
            f"{self.memory_bytes / 1e9:.0f} GB of memory at {self.memory_rate / 1e9:.0f} GB/s,"
            f" links of {self.link_rate / 1e9:.0f} GB/s, {self.call_s * 1e6:.0f} us a collective"
        )


def host_processes(ranks: int, *, master: bool) -> int:
    """Processes with MindSpore on a machine with `ranks`: also msrun, and its scheduler on the
    master."""
    return ranks + 1 + (1 if master else 0)


def rank_parameters(model: Decoder, tensor: int, *, vocab_parallel: bool = True) -> int:
    """Parameters of each of `tensor` ranks; replicated are key/value heads fewer than ranks and,
    without `vocab_parallel`, the embedding and the head."""
    local = model.shard(tensor)
    if not vocab_parallel:
        return parameter_count(local)
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return parameter_count(local) - embeddings + embeddings // tensor


def rank_memory(
    model: Decoder,
    dtype: DType,
    tensor: int,
    slots: int,
    length: int,
    *,
    use_past: bool = True,
    vocab_parallel: bool = True,
) -> Memory:
    """Memory of one rank on its device, for a KV cache of `slots` sequences of `length` tokens."""
    cache = cache_bytes(model.shard(tensor), dtype, slots, length) if use_past else 0
    parameters = rank_parameters(model, tensor, vocab_parallel=vocab_parallel)
    return Memory(parameters * BYTES_OF[dtype], cache)


@dataclass(frozen=True)
class MachineMemory:
    """Memory of all processes of one machine."""

    rank: Memory  # of each rank
    ranks: int
    others: int  # other processes with MindSpore: msrun and its scheduler

    @property
    def total(self) -> int:
        return self.ranks * self.rank.total + self.others * MSRUN_PROCESS

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks of {readable(self.rank.total)} each ({self.rank.parts()}), and"
            f" {readable(self.others * MSRUN_PROCESS)} for msrun"
        )


def machine_memory(cluster: Cluster, rank: Memory) -> MachineMemory:
    """Memory of this machine's ranks, each of which needs `rank`."""
    local = cluster.local_worker_num
    processes = host_processes(local, master=cluster.is_master)
    return MachineMemory(rank, local, processes - local)


@dataclass(frozen=True)
class Traffic:
    """Communication of a rank in a decode step."""

    reduces: int  # all-reduces: two per layer and one after the embedding
    reduced: int  # their bytes
    gathered: int  # bytes of the all-gathered logits

    @property
    def total(self) -> int:
        return self.reduced + self.gathered

    def seconds(self, tensor: int, given: Assumptions) -> float:
        """Time among `tensor` ranks: all but a rank's own part is sent twice by an all-reduce, once
        by an all-gather."""
        sent = (2 * self.reduced + self.gathered) * (tensor - 1) / tensor
        return (self.reduces + 1) * given.call_s + sent / given.link_rate


def traffic(model: Decoder, dtype: DType, slots: int) -> Traffic:
    """Communication of a decode step of `slots` sequences, with several ranks."""
    reduces = 2 * model.num_layers + 1
    reduced = reduces * slots * model.hidden_size * BYTES_OF[dtype]
    return Traffic(reduces, reduced, slots * model.vocab_size * BYTES_OF[dtype])


def degrees_of(model: Decoder, *, vocab_parallel: bool = True) -> list[int]:
    """The degrees of DEGREES that divide this model evenly."""
    return [degree for degree in DEGREES if not not_divided(model, degree, not vocab_parallel)]


def scaling_estimate(
    model: Decoder, *, slots: int, length: int, use_past: bool = True, vocab_parallel: bool = True
) -> Iterator[str]:
    """The lines of a table over DEGREES on Ascend in float16, with its assumptions."""
    given = Assumptions()
    dtype: DType = "float16"
    yield f"scaling on Ascend for {slots} x {length} tokens: an estimate, nothing is measured"
    yield f"  assumed: {dtype}, {given}"
    yield "  model_parallel  weights/rank  cache/rank  exchanged/step  step at best  speed-up"
    need_of = functools.partial(
        rank_memory,
        model,
        dtype,
        slots=slots,
        length=length,
        use_past=use_past,
        vocab_parallel=vocab_parallel,
    )
    alone = need_of(1).held / given.memory_rate
    for tensor in degrees_of(model, vocab_parallel=vocab_parallel):
        need = need_of(tensor)
        seconds, exchanged = need.held / given.memory_rate, 0
        if tensor > 1:
            exchange = traffic(model, dtype, slots)
            seconds += exchange.seconds(tensor, given)
            exchanged = exchange.total
        fits = "" if need.held <= given.memory_bytes else "  more than the memory assumed"
        yield (
            f"  {tensor:>14}  {readable(need.weights):>12}  {readable(need.cache):>10}"
            f"  {readable(exchanged):>14}  {seconds * 1e3:>9.1f} ms  {alone / seconds:>8.2f}{fits}"
        )


def ranks_plan(
    cluster: Cluster,
    model: Decoder,
    rank: Memory,
    *,
    device: str,
    slots: int,
    length: int,
    use_past: bool,
    vocab_parallel: bool,
) -> Iterator[str]:
    """The lines of dry_run=true about several ranks, each of which needs `rank`; on CPU also
    whether they fit this machine's memory."""
    need = machine_memory(cluster, rank)
    yield (
        f"{'each rank':<13} {readable(rank.weights)} of weights,"
        f" {readable(rank.cache)} of cache for {slots} x {length} tokens"
        + (f", {readable(rank.adapters)} of adapters" if rank.adapters else "")
    )
    if device == "CPU":
        free = memory.free_memory()
        fits = "enough" if need.total <= free else "NOT enough: the run would be refused"
        yield (
            f"{'memory':<13} {need}: needs {readable(need.total)}, {readable(free)} is free: {fits}"
        )
    yield from scaling_estimate(
        model, slots=slots, length=length, use_past=use_past, vocab_parallel=vocab_parallel
    )
