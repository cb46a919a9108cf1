"""How a packed block is laid out: a struct, then the parts that it has the offsets of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner.native import structs
from lite_runner.records import dataclass

ALIGNMENT = 64  # bytes: a cache line

Floats: TypeAlias = NDArray[np.float32]
Block: TypeAlias = NDArray[np.uint8]
Room: TypeAlias = Callable[[int], Block]  # gives that many bytes: zeros that start at a cache line


def aligned(nbytes: int) -> Block:
    """A new Room."""
    whole = np.zeros(nbytes + ALIGNMENT, np.uint8)  # zeroed: padding may be written to a file
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


class Part(Protocol):
    """A piece of a block."""

    @property
    def nbytes(self) -> int: ...

    def write(self, target: Block) -> None:
        """Fill `target` [nbytes]."""


class Copy:
    """An array [n], copied unchanged."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.nbytes = array.nbytes

    def write(self, target: Block) -> None:
        target[:] = self._array.view(np.uint8)


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm if beta is given."""

    gamma: Floats
    beta: Floats | None
    epsilon: float


class Layout:
    """Layout of a block: a struct followed by its parts. Only the whole block is written, so no
    part is copied twice."""

    def __init__(self, fields: ctypes.Structure) -> None:
        """`fields`: the struct; offsets may be set until the block is written."""
        self._fields = fields
        self._parts: list[tuple[int, Part]] = []
        self._size = ctypes.sizeof(fields)
        self.since = 1  # format version that introduced its matrices

    @property
    def nbytes(self) -> int:
        return -(-self._size // ALIGNMENT) * ALIGNMENT

    def add(self, part: Part) -> int:
        """Append a part; its offset."""
        at = self.nbytes
        self._parts.append((at, part))
        self._size = at + part.nbytes
        if isinstance(part, Layout):
            self.since = max(self.since, part.since)
        return at

    def norm(self, norm: Norm) -> structs.Norm:
        """The struct of a norm, whose values are appended as parts."""
        fields = structs.Norm(centred=norm.beta is not None, epsilon=norm.epsilon)
        if norm.beta is not None:
            fields.beta = self.add(Copy(norm.beta))
        fields.gamma = self.add(Copy(norm.gamma))
        return fields

    def write(self, target: Block) -> None:
        """Fill `target` [nbytes]."""
        fields = bytes(self._fields)
        target[: len(fields)] = np.frombuffer(fields, np.uint8)
        for at, part in self._parts:
            part.write(target[at : at + part.nbytes])

    def block(self, room: Room = aligned) -> Block:
        """The packed bytes, in a `room`."""
        result = room(self.nbytes)
        self.write(result)
        return result
