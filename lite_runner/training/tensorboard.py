"""Event files of TensorBoard: records of protocol buffers, each with masked CRC-32C checksums."""

from __future__ import annotations

import math
import socket
import struct
import time
from functools import cache

from lite_runner.system.protobuf import field, varint
from lite_runner.training.trainer import StepMetrics

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reversed
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32
_TAGS = {
    "loss/train": "loss",
    "loss/eval": "eval_loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}


def event_file() -> str:
    """A name by which TensorBoard knows the file."""
    return f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"


def header() -> bytes:
    """The first record of a file."""
    return record(_double(1, time.time()) + field(3, b"brain.Event:2"))


def event(step: StepMetrics) -> bytes:
    values = b"".join(
        field(1, field(1, tag.encode()) + _float(2, value))
        for tag, name in _TAGS.items()
        if (value := getattr(step, name)) is not None
    )
    return record(_double(1, time.time()) + varint(2 << 3) + varint(step.step) + field(5, values))


def record(content: bytes) -> bytes:
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    crc, table = 0xFFFFFFFF, _table()
    for byte in content:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


@cache
def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def _double(number: int, value: float) -> bytes:
    return varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    # A norm of gradients may be too large for float32, which pack() refuses.
    value = value if abs(value) <= _LARGEST else math.copysign(math.inf, value)
    return varint(number << 3 | 5) + struct.pack("<f", value)
