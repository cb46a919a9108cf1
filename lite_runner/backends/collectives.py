"""Collectives between the ranks of a job outside the network: rendezvous, and gathering results.

AllGather works on a CPU over all ranks alone; a replica's own ranks use AllReduce there. MindSpore
is imported when they are called, and not by a single rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lite_runner import profiler
from lite_runner.config.sections import Ranks
from lite_runner.errors import EnvironmentFault, first_line
from lite_runner.system import environment

if TYPE_CHECKING:
    from lite_runner.networks.tensor_parallel import TensorParallel

# On CPU a collective fails if another rank arrives later than this (30 s by default), but ranks may
# load, compile and (data parallel) generate for longer. The launcher has timeouts.
_PATIENCE = {"MS_CPU_COMM_OP_TIMEOUT": str(7 * 24 * 3600)}


def join(name: str) -> tuple[int, int]:
    """Wait until all ranks are up; call once, after the device is set. This process's rank and the
    number of ranks. Raises EnvironmentFault if the rendezvous fails."""
    from mindspore.communication import get_group_size, get_rank, init

    os.environ.update(_PATIENCE)
    try:
        init()
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"{name}: the ranks could not connect: {first_line(error)}",
            "see the other ranks' logs; parallel.rendezvous_timeout= gives them longer",
        ) from error
    return int(get_rank()), int(get_group_size())


def schedule() -> None:
    """Run the scheduler process of a job's rendezvous; returns when all ranks have left."""
    environment.import_mindspore()
    from mindspore.communication import init

    init()


def announce_semi_auto() -> None:
    """Set the mode that MindFormers' init_context sets; Model.infer_predict_layout requires it."""
    import mindspore as ms

    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")


@contextmanager
def manual_parallel() -> Iterator[None]:
    """Disable MindSpore's automatic parallelism: the networks here are sharded manually."""
    import mindspore as ms

    before = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=before)


def tensor_parallel(ranks: Ranks, *, vocab_parallel: bool) -> TensorParallel | None:
    """The tensor-parallel group of this rank's replica; None without tensor parallelism."""
    if ranks.tensor == 1:
        return None
    import mindspore as ms
    from mindspore.communication import GlobalComm, create_group

    from lite_runner.networks.tensor_parallel import TensorParallel

    world = GlobalComm.WORLD_COMM_GROUP
    group = world
    if ranks.data > 1:
        group = f"copy_{ranks.data_index}"
        first = ranks.data_index * ranks.tensor
        create_group(group, list(range(first, first + ranks.tensor)))
    gathers = group == world or ms.get_context("device_target") != "CPU"
    return TensorParallel(ranks, group, gathers, vocab_parallel)


def all_gather(ranks: Ranks) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """The collective of this rank's replica: [n] of each rank to [ranks, n], the same bits on all
    of them."""
    from mindspore import Tensor, ops

    parallel = tensor_parallel(ranks, vocab_parallel=False)
    assert parallel is not None
    count, index = ranks.tensor, ranks.tensor_index
    if parallel.gathers:
        joined = ops.AllGather(group=parallel.group)
        return lambda own: joined(Tensor(own)).asnumpy().reshape(count, -1)
    summed = ops.AllReduce(group=parallel.group)

    def padded_sum(own: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = np.zeros((count, len(own)), np.float32)
        rows[index] = own
        total: NDArray[np.float32] = summed(Tensor(rows)).asnumpy()
        return total  # adding zeros is exact

    return padded_sum


def gather(payload: bytes) -> list[bytes]:
    """All-gather: the payloads of all ranks, by rank, on every rank."""
    from mindspore import Tensor, ops

    operator = ops.AllGather()

    def gathered(values: NDArray[np.int32]) -> NDArray[np.int32]:
        joined: NDArray[np.int32] = operator(Tensor(values)).asnumpy()
        return joined.reshape(-1, len(values))

    began = time.perf_counter()
    sizes = gathered(np.array([len(payload)], np.int32))[:, 0]
    met = time.perf_counter()
    buffer = np.zeros(-(-int(sizes.max()) // 4) + 1, np.int32)  # AllGather has no 1-byte type
    buffer.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = gathered(buffer).view(np.uint8)
    if profiler.recorder is not None:
        profiler.recorder.gathered(began, met, time.perf_counter(), len(payload))
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_text(ranks: Ranks, text: str) -> list[str]:
    """The text of each rank, on every rank; returns when all are here."""
    if ranks.size == 1:
        return [text]
    return [one.decode() for one in gather(text.encode())]


def broadcast(ranks: Ranks, text: str) -> str:
    """The text of the first rank, on every rank; returns when all are here."""
    return gather_text(ranks, text)[0]


def barrier(ranks: Ranks) -> None:
    """Returns when all ranks are here."""
    gather_text(ranks, "")
