"""The one reader of JSON files, on what Python's own lets pass and what it fails on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError
from lite_runner.system.json_file import (
    MAX_DEPTH,
    MAX_DIGITS,
    parse_json,
    read_json,
    read_json_object,
)

BROKEN = [
    (b"{", "Expecting property name"),
    (b"", "Expecting value"),
    (b"\xff", "can't decode byte 0xff"),
    (b'"\xed\xa0\x80"', "can't decode byte 0xed"),  # a surrogate, encoded
    (b"[" * 100_000, "nested too deeply"),
    (b"[" * 900 + b"]" * 900, "nested too deeply"),
    (b'{"a":' * 500 + b"1" + b"}" * 500, "nested too deeply"),
    (b'{"a": 1, "a": 1}', "the key 'a' occurs twice"),
    (b'[{"b": {"a": 1, "c": 2, "a": 3}}]', "the key 'a' occurs twice"),
    (b"[NaN]", "NaN is no number of JSON"),
    (b"[Infinity]", "Infinity is no number of JSON"),
    (b"[-Infinity]", "-Infinity is no number of JSON"),
    (b"1e999", "1e999 is beyond all floats"),
    (b"-1e999", "-1e999 is beyond all floats"),
    (b"1" * 401, "a number of 401 digits"),
    (b"-" + b"1" * 5000, "a number of 5001 digits"),
    (rb'"\ud83d"', "half of a surrogate pair"),
    (rb'{"a": ["x", {"b\udc00": 1}]}', "half of a surrogate pair"),
    (rb'{"\uD83D": 1}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("data", "expected"), BROKEN)
def test_what_is_broken_is_told_in_one_line(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(data)
    with pytest.raises(ArtifactError) as error:
        read_json(path, "a manifest", hint="write it again")
    message = error.value.message
    assert message.startswith(f"{path}: not a manifest: ")
    assert expected in message
    assert "\n" not in message
    message.encode()
    assert len(message) < len(str(path)) + 200
    assert error.value.hint == "write it again"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, expected in [
        (tmp_path / "none.json", "none.json: cannot be read: No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "a\0b", "null byte"),
    ]:
        with pytest.raises(ArtifactError, match=expected):
            read_json(path)
    large = tmp_path / "large.json"
    large.write_text(" " * 1000 + "1")
    assert read_json(large, most=1001) == 1
    with pytest.raises(ArtifactError, match=r"large\.json: not valid JSON: more than 1,000 bytes"):
        read_json(large, most=1000)


def test_an_object_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("[]")
    with pytest.raises(
        ArtifactError, match=r"some\.json: not valid JSON: a JSON list, expected an object"
    ):
        read_json_object(path)
    path.write_text('{"a": []}')
    assert read_json_object(path) == {"a": []}


def test_what_is_taken() -> None:
    assert parse_json(rb'"\ud83d\ude00 \\ud83d"') == "\U0001f600 \\ud83d"
    assert parse_json(b"\xef\xbb\xbf[1.5, 1e-999, 1e5, -3, true, null]") == [
        *(1.5, 0.0, 1e5, -3, True, None)
    ]
    assert parse_json("1000000000000000019884624838656") == 10**30 + 19884624838656
    assert parse_json("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH) is not None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES | st.text(st.characters()))
def test_values_come_back_or_are_refused(value: Any) -> None:
    text = json.dumps(value)
    try:
        found = parse_json(text)
    except ValueError as error:
        assert any(word in str(error) for word in ("no number", "half of"))
    else:
        assert found == value
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


@given(st.binary(max_size=50) | st.text('[]{}"\\ud8:,019eE.-NaInfity ', max_size=50))
def test_any_bytes_are_read_or_refused(data: bytes | str) -> None:
    try:
        found = parse_json(data)
    except ValueError:
        return
    json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
