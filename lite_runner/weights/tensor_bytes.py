"""Bytes of tensors while they are loaded, counted from a checkpoint's headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import groupby

from lite_runner.records import dataclass
from lite_runner.weights.read_ahead import AHEAD_BYTES
from lite_runner.weights.tensor import LazyTensor

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of one tensor while it is loaded."""

    temporary: int  # buffers while it is read
    loaded: int  # read, waiting to be packed
    resident: int  # in the network
    copied: bool  # packing copies it; else the network takes the loaded array


def native_bytes(tensor: LazyTensor, *, dequantize: bool) -> TensorBytes:
    """Packed for the native operators: quantized, 16 bits or float32."""
    count = math.prod(tensor.shape)
    if tensor.own is not None:  # scales of 6 bits take 8
        size = 4 * count if dequantize else tensor.own.nbytes * 33 // 32
        return TensorBytes(0, tensor.own.nbytes, size, True)
    if tensor.integers is not None:
        loaded = tensor.integers.scheme.nbytes(*tensor.shape[-2:])
        temporary = 0 if tensor.integers.stored or tensor.part is not None else 4 * count
        return TensorBytes(temporary, loaded, 4 * count if dequantize else loaded, True)
    if len(tensor.shape) == 1:
        return TensorBytes(0, 4 * count, 4 * count, True)
    return TensorBytes(_rounding_bytes(tensor), tensor.nbytes, tensor.nbytes, True)


def mindspore_bytes(tensor: LazyTensor, *, copied: bool) -> TensorBytes:
    """For MindSpore's operators on a CPU: float32; `copied`: matrices are transposed."""
    size = 4 * math.prod(tensor.shape)
    integers, temporary = tensor.integers, _rounding_bytes(tensor)
    if integers is not None:
        temporary = integers.scheme.nbytes(*tensor.shape[-2:])
    if tensor.dtype != "F32":
        temporary += tensor.nbytes
    return TensorBytes(temporary, size, size, copied and len(tensor.shape) > 1)


def _rounding_bytes(tensor: LazyTensor) -> int:
    """A float32 copy, of tensors that are rounded as a whole."""
    rounded = tensor.part is None and tensor.dtype != "F32"
    return 4 * math.prod(tensor.shape) if rounded else 0


def loading_peak(tensor_bytes: Mapping[str, TensorBytes]) -> int:
    """Peak bytes while tensors are read in order and packed by layer: the loaded tensors of a layer
    are freed once it is packed, and the next ones are read ahead."""
    layers = [
        list(some) for _, some in groupby(tensor_bytes.items(), lambda item: _layer_of(item[0]))
    ]
    most = packed = 0
    waiting = [one for layer in layers for _, one in layer]
    for layer in layers:
        mine = [one for _, one in layer]
        del waiting[: len(mine)]
        sources = sum(one.loaded for one in mine if one.copied)
        temporary = max((one.temporary for one in waiting[:2]), default=0)  # two threads read
        most = max(most, packed + max(one.temporary + one.loaded for one in mine))
        packed += sum(one.resident for one in mine)
        largest = max(one.loaded for one in mine)
        ahead = min(sum(one.loaded for one in waiting), max(0, AHEAD_BYTES - largest))
        most = max(most, packed + sources + ahead + temporary)
    return most


def _layer_of(name: str) -> str:
    found = _LAYER.search(name)
    return found[1] if found else name
