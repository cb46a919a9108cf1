"""Messages that do not parse, and texts in them that are none."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from lite_runner.system.protobuf import parse_message


def test_a_message() -> None:
    written = FileDescriptorProto(name="é", dependency=["a", "b"])
    written.message_type.add(name="M").field.add(name="f", number=1)
    assert parse_message(FileDescriptorProto, written.SerializeToString()) == written


@pytest.mark.parametrize("where", [b"name", b"dependency", b"message", b"field"])
def test_a_text_that_is_not_utf_8(where: bytes) -> None:
    written = FileDescriptorProto(name="name", dependency=["a", "dependency"])
    written.message_type.add(name="message").field.add(name="field", number=1)
    data = written.SerializeToString().replace(where, b"\xff" * len(where))
    with pytest.raises(ValueError, match=r"(?i)utf-8"):
        parse_message(FileDescriptorProto, data)


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\x7fx", b"\x0f"])
def test_invalid_messages(data: bytes) -> None:
    # The last is what protobuf in Python says, which MindSpore chooses where it comes first.
    with pytest.raises(ValueError, match=r"parsing|wire|message|Truncated"):
        parse_message(FileDescriptorProto, data)
