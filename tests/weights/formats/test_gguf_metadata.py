from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.gguf_metadata import TensorEntry, read_header, read_metadata

VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "a.text": "Grüße 你好",
    "a.empty": "",
    "a.flag": True,
    "a.uint8": 200,
    "a.int64": -(2**60),
    "a.float": 0.5,
    "a.double": 0.1,
    "a.texts": ["", "ab", "你"],
    "a.numbers": [1, -2, 3],
    "a.floats": [0.5, -1.25],
    "a.flags": [True, False],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", VALUES["a.text"])
    writer.add_key_value("a.empty", "", gguf.GGUFValueType.STRING)
    writer.add_bool("a.flag", True)
    writer.add_uint8("a.uint8", 200)
    writer.add_int64("a.int64", -(2**60))
    writer.add_float32("a.float", 0.5)
    writer.add_float64("a.double", 0.1)
    for name in ("a.texts", "a.numbers", "a.floats", "a.flags"):
        writer.add_array(name, VALUES[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_all_types(path: Path) -> None:
    assert read_metadata(path) == VALUES


def test_a_file_cut_anywhere(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ArtifactError):
            read_metadata(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes_end_in_a_value_or_an_error(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    changed = path.with_suffix(".changed")
    changed.write_bytes(content)
    try:
        assert isinstance(read_metadata(changed), dict)
    except ArtifactError as error:
        assert str(changed) in error.message


def header(keys: int, body: bytes = b"", version: int = 3, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def text_array(*lengths: int) -> bytes:
    """Strings of these lengths, none of which has a character in the file."""
    return struct.pack(f"<IQ{len(lengths)}Q", 8, len(lengths), *lengths)


def tensor(name: bytes, shape: tuple[int, ...] = (3, 2)) -> bytes:
    start = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
    return start + struct.pack(f"<{len(shape)}QIQ", *shape, 0, 64)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "it is empty"),
        (b"PK\x03\x04 and more of a zip file", "not a GGUF file"),
        (header(0, version=1), "GGUF version 0x1, expected 2 or 3"),
        (header(2**60), "keys, at most"),
        (header(1, struct.pack("<Q", 2**63)), "a string of"),
        (header(1, key(b"a", 99, b"")), "'a': value type 99 is unknown"),
        (header(1, key(b"a", 9, struct.pack("<IQ", 8, 2**61))), "strings announced"),
        (header(1, key(b"a", 9, struct.pack("<IQ", 4, 2**61))), "bytes announced"),
        (header(1, key(b"a", 9, struct.pack("<IQ", 9, 1))), "value type 9 is unknown"),
        (header(1, key(b"a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (header(2, key(b"a", 7, b"\1") * 2), "the key occurs twice"),
        (header(1, key(b"a", 9, text_array(2**63, 1))), "strings go on past the end"),
        (header(1, key(b"a", 9, text_array(2**40))), "strings go on past the end"),
        (header(1, key(b"a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")), "key 'a': .* not UTF-8"),
        (header(0, tensor(b"w") * 2, tensors=2), "tensor 'w': the tensor occurs twice"),
        (header(0, tensor(b"w"), tensors=2**60), "tensors announced"),
        (header(0, tensor(b"w", ()) + b"\0" * 8, tensors=1), "0 dimensions, expected 1 to 4"),
        (header(0, tensor(b"w", (1,) * 5), tensors=1), "5 dimensions, expected 1 to 4"),
        (header(0, tensor(b"w", (2**48,)), tensors=1), "impossible shape"),
    ],
)
def test_hostile_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as error:
        read_metadata(path)
    assert error.value.exit_code == 4


def test_tensors_follow_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    head = header(1, key(b"a", 7, b"\1") + tensor(b"w") + tensor(b"v", (5,)), tensors=2)
    path.write_bytes(head + b"\0" * 100)
    found = read_header(path)
    assert found.metadata == {"a": True}
    assert found.tensors == (TensorEntry("w", (2, 3), 0, 64), TensorEntry("v", (5,), 0, 64))
    assert found.end == len(head) and len(found.data) == len(head) + 100


def test_arrays_are_decoded_on_request(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(1, key(b"a", 9, struct.pack("<IQQ", 8, 1, 1) + b"\xff")))
    array = read_header(path).metadata["a"]
    assert (array.count, str(array)) == (1, "<array of 1 values>")
    with pytest.raises(ArtifactError, match="not UTF-8"):
        array.values()


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot read"):
        read_metadata(tmp_path / "none.gguf")


def test_a_header_that_is_held_is_not_parsed_again(path: Path) -> None:
    header = read_header(path)
    assert read_header(path) is header and read_metadata(path) == VALUES
    os.utime(path, ns=(1, 1))
    assert read_header(path) is not header  # the file has changed
    held = weakref.ref(header)
    del header
    assert held() is None, "the file stays mapped"
