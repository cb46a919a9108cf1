"""Ranks that share a model: exchange through a machine's memory (src/peers.h), a collective between
machines, and the NUMA node of each.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import EnvironmentFault, RunnerError
from lite_runner.native import library
from lite_runner.native.structs import Share

LOST = 3  # codes of a step from here on mean a lost rank
NODES = Path("/sys/devices/system/node")
PATIENCE_S = 10.0  # without a peer, in which the launcher names that one and ends this one
_TOKEN = 16  # random bytes at the end of the file, by which ranks recognize it
_ELSEWHERE = "elsewhere"

AllGather = Callable[[NDArray[np.float32]], NDArray[np.float32]]  # [n] of each rank: [ranks, n]
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), *[ctypes.c_int64] * 2)


class Peers:
    """This rank's end of the memory, or of the collective."""

    def __init__(self, file: int, share: Share, all_gather: AllGather | None = None) -> None:
        """`file`: an open file description of this rank alone, which is closed with it; with
        `all_gather` the file is nobody else's either."""
        self.share = share
        self.all_gather = all_gather  # None: they share memory
        self._error: Exception | None = None
        self._callback = _Callback(self._gather) if all_gather else _Callback()
        numbers = (share.index, share.count, int(1000 * PATIENCE_S))
        self.handle: int | None
        self.handle = library().lite_runner_peers_open(file, *numbers, self._callback)
        if self.handle is None:
            raise EnvironmentFault(
                f"the ranks of a model cannot map {_bytes(share.count)} bytes of shared memory",
                "free memory, or backend=ms: MindSpore's operators and collectives",
            )

    def close(self) -> None:
        """Leave; ranks that still wait for this one give up."""
        if self.handle is not None:
            library().lite_runner_peers_close(self.handle)
            self.handle = None

    def lost(self, failed: int) -> Exception:
        """The error of a step whose code names the rank that did not take part."""
        if self._error is not None:
            return self._error
        return RunnerError(
            f"the rank with part {failed - LOST} of the model has ended, so this one cannot"
            " continue",
            "its own error says why; without one it was killed, possibly out of memory",
        )

    def _gather(self, places: ctypes._Pointer[ctypes.c_float], place: int, count: int) -> int:
        """See Peers::AllGather; an exception cannot pass through the kernels."""
        assert self.all_gather is not None
        try:
            rows = np.ctypeslib.as_array(places, (self.share.count, place))[:, :count]
            rows[...] = self.all_gather(rows[self.share.index])
        except Exception as error:  # raised by `lost`
            self._error = error
            return 1
        return 0


def meet_peers(
    share: Share,
    gather: Callable[[str], list[str]],
    first: int,
    collective: Callable[[], AllGather],
) -> Peers:
    """Meet the ranks that share the model: `first` among all, and those behind it. Without shared
    memory, `collective` exchanges their numbers.

    `gather`: all-gather of a text. The memory has no name that could be left behind. Raises
    EnvironmentFault on every rank where any of them cannot map it.
    """
    token = os.urandom(_TOKEN)
    own = _memory(share.count, token)
    said = gather(f"/proc/{os.getpid()}/fd/{own} {token.hex()}")
    path, token_text = said[first].split()
    failure, peers = "", None
    try:
        peers = Peers(_opened(path, token_text, share.count), share)
    except OSError:
        failure = _ELSEWHERE
    except EnvironmentFault as error:
        failure = str(error)
    every = gather(failure)
    elsewhere = _ELSEWHERE in every[first : first + share.count]
    failures = [one for one in every if one not in ("", _ELSEWHERE)]
    if peers is not None and (failures or elsewhere):
        peers.close()
    if elsewhere and not failures:
        return Peers(own, share, collective())
    os.close(own)
    if failures or peers is None:
        raise EnvironmentFault(
            f"the ranks of a model do not share memory: {failures[0]}",
            "backend=ms: MindSpore's operators and collectives",
        )
    return peers


def bind_to_node(index: int, count: int, nodes: Path = NODES) -> None:
    """Bind this process, the `index`th of `count` on this machine, to its NUMA nodes, where there
    are several: threads and memory that it allocates from now on are theirs."""
    allowed = os.sched_getaffinity(0)
    every = [_processors(one) & allowed for one in sorted(nodes.glob("node[0-9]*"), key=_number)]
    every = [one for one in every if one]
    if len(every) < 2:
        return
    start = index * len(every) // count
    stop = max(start + 1, (index + 1) * len(every) // count)
    os.sched_setaffinity(0, set().union(*every[start:stop]))


def _processors(node: Path) -> set[int]:
    """The processors of a node, which its cpulist has as "0-3,8"."""
    found: set[int] = set()
    for part in (node / "cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1)) if first else set()
    return found


def _number(node: Path) -> int:
    return int(re.sub(r"\D", "", node.name))


def _bytes(count: int) -> int:
    size: int = library().lite_runner_peers_bytes(count)
    return size


def _memory(count: int, token: bytes) -> int:
    """A file in memory for `count` ranks, which ends with the token."""
    file = os.memfd_create("lite_runner_peers")
    os.ftruncate(file, _bytes(count) + _TOKEN)
    os.pwrite(file, token, _bytes(count))
    return file


def _opened(path: str, token: str, count: int) -> int:
    """The file, as an open file description of its own. Raises OSError where it is not the one with
    the token: the path is another machine's."""
    file = os.open(path, os.O_RDWR)
    if os.pread(file, _TOKEN, _bytes(count)).hex() != token:
        os.close(file)
        raise OSError(f"{path} is another file")
    return file
