"""Protobuf messages that anybody may have written: one parser, whose errors are ValueErrors."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError, Message


def parse_message(kind: Any, data: bytes) -> Any:
    """The message of class `kind` in `data`. Every text in it is a str.

    Raises ValueError where that is no such message, or a text in it is not UTF-8, which protobuf
    itself says only of some messages; of others it gives the text as bytes.
    """
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
                if isinstance(value, Message):
                    left.append(value)
                else:
                    left.extend(value)
            elif field.type == field.TYPE_STRING:
                for text in (value,) if isinstance(value, (str, bytes)) else value:
                    if isinstance(text, bytes):
                        raise ValueError(f"{field.name} is not UTF-8: {text[:20]!r}")
