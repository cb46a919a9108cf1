"""Memory of several ranks, and a roofline estimate of tensor parallelism.

A decode step reads a rank's weights and KV cache once, all-reduces the hidden state twice per layer
and once after the embedding, and all-gathers the logits, each at the assumed bandwidth. Arithmetic,
operator launches and sampling are left out: real steps take longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from lite_runner.architectures.spec import Decoder
from lite_runner.config.cluster import cluster_of
from lite_runner.config.parallel import not_divided
from lite_runner.config.schema import DType, RunConfig
from lite_runner.records import dataclass
from lite_runner.sizing.need import (
    BYTES_OF,
    Memory,
    cache_bytes,
    parameter_count,
    readable,
)
from lite_runner.system import memory

PROCESS_BYTES = 450 << 20  # of an msrun process that has imported MindSpore, measured
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
        return self.ranks * self.rank.total + self.others * PROCESS_BYTES

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks of {readable(self.rank.total)} each ({self.rank.parts()}), and"
            f" {readable(self.others * PROCESS_BYTES)} for msrun"
        )


def machine_memory(config: RunConfig, rank: Memory) -> MachineMemory:
    """Memory of this machine's ranks, each of which needs `rank`."""
    cluster = cluster_of(config)
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
    model: Decoder,
    *,
    slots: int,
    length: int,
    use_past: bool = True,
    vocab_parallel: bool = True,
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
    config: RunConfig, model: Decoder, rank: Memory, *, device: str, slots: int, length: int
) -> Iterator[str]:
    """The lines of dry_run=true about several ranks, each of which needs `rank`; on CPU also
    whether they fit this machine's memory."""
    need = machine_memory(config, rank)
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
        model,
        slots=slots,
        length=length,
        use_past=config.use_past,
        vocab_parallel=config.vocab_parallel,
    )
