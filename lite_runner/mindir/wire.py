"""Reads protobuf's wire format without a schema: the fields of a message and their offsets.

A field is a varint tag (number and wire type), then a varint, 4 or 8 bytes, or a length and that
many bytes (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

_MIND_IR_VERSION = 13  # the field of ModelProto in MindSpore's mind_ir.proto


def mindir_version(path: Path) -> int | None:
    """The version of a MindIR; None if the file has none, or is no MindIR."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, _, value, end in fields(data, 0, len(data)):
                if number == _MIND_IR_VERSION:
                    return read_varint(data, value, end)[0]
    except (OSError, ValueError):  # missing, empty, encrypted, ...
        return None
    return None


def fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Per field its number and the offsets of its start, of its value and of its end.

    Raises ValueError if this is no message.
    """
    while at < end:
        first = at
        tag, at = read_varint(data, at, end)
        kind, value = tag & 7, at
        if kind == 0:
            _, at = read_varint(data, at, end)
        elif kind == 2:
            size, value = read_varint(data, at, end)
            at = value + size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {first}")
        if at > end:
            raise ValueError(f"a field at byte {first} exceeds the message")
        yield tag >> 3, first, value, at


def read_varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    """The varint at an offset, and the offset of its end. Raises ValueError if it has none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError(f"truncated varint at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a varint of more than 10 bytes at byte {at}")


def varint(value: int) -> bytes:
    """Encode a varint."""
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])
