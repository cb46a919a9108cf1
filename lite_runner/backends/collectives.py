"""What the ranks of a job do together outside the network: meet, and gather what each has made.

Only AllGather over all ranks is used, which runs on CPU and Ascend alike.
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

# On CPU a collective fails when another rank comes later than this, 30 s by default; yet ranks
# load, compile and (data parallel) generate for as long as they need. The launcher has timeouts.
_PATIENCE = {"MS_CPU_COMM_OP_TIMEOUT": str(7 * 24 * 3600)}


def meet(ranks: Ranks) -> None:
    """Wait until all ranks are up; to be called once, when MindSpore knows the device.

    Raises EnvironmentFault where they do not meet, or are others than `ranks` says.
    """
    found = join(f"rank {ranks.rank} of {ranks.size}")
    if found != (ranks.rank, ranks.size):
        raise EnvironmentFault(
            f"this is rank {found[0]} of {found[1]}, expected rank {ranks.rank} of {ranks.size}"
            f" (data_parallel {ranks.data} x model_parallel {ranks.tensor})",
            "start as many workers as parallel_config says",
        )


def join(name: str) -> tuple[int, int]:
    """Wait until all ranks are up; this process's rank and their number. See `meet`."""
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
    """What MindFormers' init_context leaves behind; Model.infer_predict_layout refuses without."""
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")


@contextmanager
def cut_by_hand() -> Iterator[None]:
    """Within, MindSpore does not cut networks, whose parts here know how they work together."""
    before = ms.get_auto_parallel_context("parallel_mode")
    ms.set_auto_parallel_context(parallel_mode="stand_alone")
    try:
        yield
    finally:
        ms.set_auto_parallel_context(parallel_mode=before)


def schedule() -> None:
    """Be the scheduler of a job, through which its ranks meet; returns when they have left."""
    init()


def tensor_parallel(ranks: Ranks, *, vocab_parallel: bool) -> TensorParallel | None:
    """How the network of this rank works with those that share its copy; None where none does."""
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
    """The payloads of all ranks, on every rank, by rank; returns when the last has come."""
    all_gather = ops.AllGather()

    def gathered(values: NDArray[np.int32]) -> NDArray[np.int32]:
        joined: NDArray[np.int32] = all_gather(Tensor(values)).asnumpy()
        return joined.reshape(-1, len(values))

    sizes = gathered(np.array([len(payload)], np.int32))[:, 0]
    words = np.zeros(-(-int(sizes.max()) // 4) + 1, np.int32)  # AllGather has no type of one byte
    words.view(np.uint8)[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = gathered(words).view(np.uint8)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
