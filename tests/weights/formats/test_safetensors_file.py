from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import numpy as library

from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.safetensors_file import (
    looks_like_safetensors,
    open_safetensors,
    write_safetensors,
)


def lazy(array: np.ndarray, dtype: Any = "F32") -> LazyTensor:
    return LazyTensor(array.shape, dtype, lambda: array)


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    path.write_bytes(claimed.to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1, 2.5], np.float16),
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.float32),
    }
    library.save_file(arrays, tmp_path / "x.safetensors", {"format": "pt"})
    found = open_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].read().dtype == array.dtype
        np.testing.assert_array_equal(found[name].read(), array)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    arrays = {
        "odd": np.arange(3, dtype=np.float16),
        "later": np.arange(4, dtype=np.float32).reshape(2, 2),
    }
    tensors = {"odd": lazy(arrays["odd"], "F16"), "later": lazy(arrays["later"])}
    write_safetensors(tmp_path / "x.safetensors", tensors, {"format": "ms"})
    found = library.load_file(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    # Wider items come first, so every tensor stays aligned and is read without a copy.
    read = open_safetensors(tmp_path / "x.safetensors")["later"].read()
    assert read.flags.aligned and not read.flags.owndata


def test_bfloat16_is_raw_bits(tmp_path: Path) -> None:
    bits = np.array([0x3F80, 0xC000, 0x7FC1], np.uint16)  # 1, -2, a NaN with payload
    write_safetensors(tmp_path / "x.safetensors", {"w": lazy(bits, "BF16")}, {})
    found = open_safetensors(tmp_path / "x.safetensors")["w"]
    assert (found.dtype, found.read().dtype) == ("BF16", np.uint16)
    np.testing.assert_array_equal(found.read(), bits)
    assert found.float32()[:2].tolist() == [1.0, -2.0]


def test_reading_copies_nothing_and_cannot_write(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"w": lazy(np.ones(8, np.float32))}, {})
    tensor = open_safetensors(tmp_path / "x.safetensors")["w"]
    assert np.shares_memory(tensor.read(), tensor.read())
    assert not tensor.read().flags.writeable


def test_unaligned_tensor_is_copied(tmp_path: Path) -> None:
    header = {"a": entry([1], 0, 2, "F16"), "b": entry([1], 2, 6)}
    data = np.float16(1).tobytes() + np.float32(7).tobytes()
    found = open_safetensors(write_raw(tmp_path / "x.safetensors", header, data))["b"].read()
    assert found.flags.aligned
    assert found.tolist() == [7.0]


def test_other_types_are_refused_unless_ignored(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", {"mask": entry([2], 0, 2, "BOOL")}, b"\0\1")
    assert open_safetensors(file, lambda name: name == "mask") == {}
    with pytest.raises(ArtifactError, match="tensor mask is BOOL, expected one of F32, F16, BF16"):
        open_safetensors(file)


BROKEN = {
    "too short": (b"\x01\x02", "2 bytes, too few"),
    "header longer than the file": (b"\xff\0\0\0\0\0\0\0{}", "claims 255 bytes, 2 follow"),
    "huge header": (b"\xff" * 8 + b"{}", "at most 100,000,000 allowed"),
    "not JSON": (b"\x02\0\0\0\0\0\0\0{x", "not valid JSON"),
    "not UTF-8": (b"\x02\0\0\0\0\0\0\0{\xff", "not valid JSON"),
    "a list": (b"\x02\0\0\0\0\0\0\0[]", "a JSON list, expected an object"),
    "deep nesting": ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not valid JSON"),
    "bytes behind": (b"\x02\0\0\0\0\0\0\0{}junk", "4 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(case: str, tmp_path: Path) -> None:
    content, expected = BROKEN[case]
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=expected) as caught:
        open_safetensors(file)
    assert caught.value.exit_code == 4
    assert str(file) in str(caught.value)


HOSTILE: dict[str, tuple[object, str]] = {
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, "must have exactly dtype, shape"),
    "further key": ({"a": entry([1], 0, 4) | {"x": 1}}, "must have exactly"),
    "unknown type": ({"a": entry([1], 0, 4, "F31")}, "unknown dtype 'F31'"),
    "type not text": ({"a": entry([1], 0, 4) | {"dtype": [1]}}, "unknown dtype"),
    "negative size": ({"a": entry([-1], 0, 4)}, "expected lists of non-negative integers"),
    "size is a flag": ({"a": entry([True], 0, 4)}, "expected lists of non-negative"),
    "size is a float": ({"a": entry([1.0], 0, 4)}, "expected lists of non-negative"),
    "overflowing shape": ({"a": entry([2**40, 2**40], 0, 4)}, "needs 4,835,703,278,458,5"),
    "too many dimensions": ({"a": entry([1] * 33, 0, 4)}, "expected lists of non-negative"),
    "backwards": ({"a": entry([1], 4, 0)}, "lies at bytes 4..0"),
    "impossible shape": ({"a": entry([2**48, 0], 0, 4)}, "has the impossible shape"),
    "far past the end": ({"a": entry([1], 0, 2**48)}, "lies at bytes 0..281474976710656, the file"),
    "past any file": ({"a": entry([1], 10**39, 10**39)}, "10000000.*the file holds 4"),
    "past the end": ({"a": entry([2], 0, 8)}, "lies at bytes 0..8, the file holds 4"),
    "wrong size": ({"a": entry([2], 0, 4)}, "needs 8 bytes, its offsets give 4"),
    "gap": ({"a": entry([0], 0, 0), "b": entry([0], 4, 4)}, "leaves a gap before it"),
    "overlap": ({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, "overlaps the one before"),
    "metadata": ({"__metadata__": {"a": 1}}, "must map texts to texts"),
    "twice": (b'{"a":1,"a":2}', "'a' occurs twice"),
    "huge number": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header(case: str, tmp_path: Path) -> None:
    header, expected = HOSTILE[case]
    with pytest.raises(ArtifactError, match=expected):
        open_safetensors(write_raw(tmp_path / "x.safetensors", header, b"\0" * 4))


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(ArtifactError, match="the file is empty"):
        open_safetensors(tmp_path / "x.safetensors")


def test_truncation_is_noticed_at_every_length(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_safetensors(file, {"w": lazy(np.ones((3, 5), np.float32))}, {"format": "ms"})
    whole = file.read_bytes()
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ArtifactError):
            open_safetensors(file)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
@example(position=0, bit=7)
def test_a_flipped_bit_of_the_header_never_escapes(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    file = tmp_path_factory.mktemp("flip") / "x.safetensors"
    write_safetensors(file, {"w": lazy(np.ones((3, 5), np.float32))}, {"format": "ms"})
    data = bytearray(file.read_bytes())
    position %= len(data) - 60  # the length and the header
    data[position] ^= 1 << bit
    file.write_bytes(data)
    try:
        found = open_safetensors(file)
    except ArtifactError:
        return
    # What still parses (a changed name or key of the metadata) holds all the data.
    assert sum(tensor.read().size for tensor in found.values()) == 15


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
tensor_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "U8", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 3), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    }
)


@given(
    header=st.dictionaries(st.text(max_size=12), tensor_entries | json_values),
    size=st.integers(0, 40),
)
def test_any_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], size: int
) -> None:
    file = write_raw(tmp_path_factory.mktemp("any") / "x.safetensors", header, b"\0" * size)
    try:
        found = open_safetensors(file)
    except ArtifactError:
        return
    assert sum(tensor.read().nbytes for tensor in found.values()) == size


def test_detection(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x", {"w": lazy(np.ones(1, np.float32))}, {})
    assert looks_like_safetensors(tmp_path / "x")
    (tmp_path / "y").write_bytes(b"GGUF\3\0\0\0{")
    (tmp_path / "z").write_bytes(b"PK\3\4")
    assert not looks_like_safetensors(tmp_path / "z")


def test_too_small_a_disk_is_reported_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100, total=1 << 30))
    with pytest.raises(EnvironmentFault, match="disk is too small") as caught:
        write_safetensors(tmp_path / "x.safetensors", {"w": lazy(np.ones(99, np.float32))}, {})
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write_safetensors(file, {"w": lazy(np.ones(4, np.float32))}, {})
    before = file.read_bytes()

    def fail() -> np.ndarray:
        raise KeyboardInterrupt

    tensors = {"v": lazy(np.ones(9, np.float32)), "w": LazyTensor((9,), "F32", fail)}
    with pytest.raises(KeyboardInterrupt):
        write_safetensors(file, tensors, {})
    assert file.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["x.safetensors"]


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be created"):
        write_safetensors(tmp_path / "file" / "x.safetensors", {}, {})
