"""Protobuf messages that anybody may have written, whose errors are ValueErrors: parsed whole, or
walked field by field without a copy of what is large.

A field is a varint tag (number and wire type), then a varint, 4 or 8 bytes, or a length and that
many bytes (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from google.protobuf.message import Message


class _Data(Protocol):
    def __getitem__(self, at: int, /) -> Any: ...


def parse_message(kind: Any, data: bytes) -> Any:
    """The message of class `kind` in `data`. Every text in it is a str.

    Raises ValueError where it is not such a message, or a text in it is not UTF-8, which protobuf
    itself says only of some messages; of others it gives the text as bytes.
    """
    from google.protobuf.message import DecodeError

    try:
        message = kind.FromString(data)
        _check_texts(message)
    except DecodeError as error:
        raise ValueError(f"{error}") from error
    return message


def _check_texts(message: Message) -> None:
    left: list[Message] = [message]
    while left:
        for field, value in left.pop().ListFields():
            if field.type == field.TYPE_MESSAGE:
                if hasattr(value, "ListFields"):
                    left.append(value)
                else:
                    left.extend(value)
            elif field.type == field.TYPE_STRING:
                for text in (value,) if isinstance(value, (str, bytes)) else value:
                    if isinstance(text, bytes):
                        raise ValueError(f"{field.name} is not UTF-8: {text[:20]!r}")


def fields(data: _Data, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Per field its number and the offsets of its start, of its value and of its end.

    Raises ValueError if this is not a message.
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
            raise ValueError(f"wire type {kind} at byte {first:,}")
        if at > end:
            raise ValueError(
                f"the field at byte {first:,} ends at byte {at:,}, its message at {end:,}"
            )
        yield tag >> 3, first, value, at


def read_varint(data: _Data, at: int, end: int) -> tuple[int, int]:
    """The varint at an offset, and the offset of its end. Raises ValueError if it has none."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise ValueError(f"truncated varint at byte {at:,}")
        byte = int(data[at])
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a varint of more than 10 bytes at byte {at:,}")


def varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes, a text or a message."""
    return opening(number, len(content)) + content


def opening(number: int, size: int) -> bytes:
    """The bytes before the `size` bytes of such a field."""
    return varint(number << 3 | 2) + varint(size)
