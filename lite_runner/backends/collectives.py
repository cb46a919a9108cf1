"""Collectives between the ranks of a job outside the network: rendezvous, and gathering results.

Only AllGather over all ranks is used, which works on both CPU and Ascend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank, init
from numpy.typing import NDArray

from lite_runner.config.ranks import Ranks
from lite_runner.errors import EnvironmentFault
from lite_runner.networks.tensor_parallel import TensorParallel

# On CPU a collective fails if another rank arrives later than this (30 s by default), but ranks may
# load, compile and (data parallel) generate for longer. The launcher has timeouts.
_PATIENCE = {"MS_CPU_COMM_OP_TIMEOUT": str(7 * 24 * 3600)}


def meet(ranks: Ranks) -> None:
    """Wait until all ranks are up; call once, after the device is set.

    Raises EnvironmentFault if the rendezvous fails, or rank or size differ from `ranks`.
    """
    found = join(f"rank {ranks.rank} of {ranks.size}")
    if found != (ranks.rank, ranks.size):
        raise EnvironmentFault(
            f"this is rank {found[0]} of {found[1]}, expected rank {ranks.rank} of {ranks.size}"
            f" (data_parallel {ranks.data} x model_parallel {ranks.tensor})",
            "start as many workers as parallel_config says",
        )


def join(name: str) -> tuple[int, int]:
    """Wait until all ranks are up; this process's rank and the number of ranks. See `meet`."""
    os.environ.update(_PATIENCE)
    try:
        init()
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(
            f"{name}: the ranks did not meet: {reason[0]}",
            "see the other ranks' logs; parallel.rendezvous_timeout= gives them longer",
        ) from error
    return int(get_rank()), int(get_group_size())


def announce_semi_auto() -> None:
    """Set the mode that MindFormers' init_context sets; Model.infer_predict_layout requires it."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")


@contextmanager
def manual_parallel() -> Iterator[None]:
    """Disable MindSpore's automatic parallelism: the networks here are sharded manually."""
    before = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=before)


def schedule() -> None:
    """Run the scheduler process of a job's rendezvous; returns when all ranks have left."""
    init()


def tensor_parallel(ranks: Ranks, *, vocab_parallel: bool) -> TensorParallel | None:
    """The tensor-parallel group of this rank's replica; None without tensor parallelism."""
    if ranks.tensor == 1:
        return None
    world = GlobalComm.WORLD_COMM_GROUP
    group = world
    if ranks.data > 1:
        group = f"copy_{ranks.data_index}"
        first = ranks.data_index * ranks.tensor
        create_group(group, list(range(first, first + ranks.tensor)))
    gathers = group == world or ms.get_context("device_target") != "CPU"
    return TensorParallel(ranks, group, gathers, vocab_parallel)


def gather(payload: bytes) -> list[bytes]:
    """All-gather: the payloads of all ranks, by rank, on every rank."""
    all_gather = ops.AllGather()

    def gathered(values: NDArray[np.int32]) -> NDArray[np.int32]:
        joined: NDArray[np.int32] = all_gather(Tensor(values)).asnumpy()
        return joined.reshape(-1, len(values))

    sizes = gathered(np.array([len(payload)], np.int32))[:, 0]
    buffer = np.zeros(-(-int(sizes.max()) // 4) + 1, np.int32)  # AllGather has no 1-byte type
    buffer.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = gathered(buffer).view(np.uint8)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
