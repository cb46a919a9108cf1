from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import weights_file
from lite_runner.weights.formats import gguf_blocks, gguf_file
from lite_runner.weights.formats.gguf_blocks import dequantize
from lite_runner.weights.formats.gguf_file import (
    QUANTIZED_TYPES,
    Array,
    TensorEntry,
    open_gguf,
    parts_of,
    read_header,
    read_metadata,
)

ROWS, COLUMNS = 24, 512


def blocks(kind: str, seed: int = 0) -> np.ndarray:
    """ROWS x COLUMNS quantized values: of real numbers where gguf can, else random bits."""
    generator = np.random.default_rng(seed)
    quantization = GGMLQuantizationType[kind]
    if "_K" not in kind and "IQ" not in kind and kind != "NVFP4":
        return quants.quantize(generator.standard_normal((ROWS, COLUMNS), np.float32), quantization)
    shape = quants.quant_shape_to_byte_shape((ROWS, COLUMNS), quantization)
    return generator.integers(0, 256, shape, dtype=np.uint8)


def write(
    path: Path, tensors: dict[str, tuple[np.ndarray, str]], fill: Callable[[GGUFWriter], None]
) -> Path:
    writer = GGUFWriter(path, "llama")
    fill(writer)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small(path: Path) -> Path:
    def fill(writer: GGUFWriter) -> None:
        writer.add_block_count(2)
        writer.add_token_list(["a", "b"])
        writer.add_token_scores([0.5, 1.5])

    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    return write(path, {"w": (values, "F32"), "v": (values.astype(np.float16), "F16")}, fill)


def bits(array: np.ndarray) -> np.ndarray:
    """Bits, with every NaN alike: random scales hold some."""
    return np.where(np.isnan(array), np.float32(np.nan), array).view(np.uint32)


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_dequantizes_as_gguf_does_bit_for_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_blocks, "VALUES_AT_ONCE", 1 << 11)  # several pieces, the last smaller
    data = blocks(kind)
    file = write(tmp_path / "x.gguf", {"w": (data, kind)}, lambda writer: None)
    tensor = open_gguf(file).tensors["w"].lazy()
    assert (tensor.shape, tensor.dtype) == ((ROWS, COLUMNS), "F32")
    with np.errstate(all="ignore"):
        expected = quants.dequantize(data, GGMLQuantizationType[kind])
        np.testing.assert_array_equal(bits(tensor.read()), bits(expected))
        assert bits(dequantize(data.reshape(-1), kind)).tolist() == bits(expected).ravel().tolist()
        some_rows = open_gguf(file).tensors["w"].lazy(3, 7)
        np.testing.assert_array_equal(bits(some_rows.read()), bits(expected[3:7]))


def test_metadata(tmp_path: Path) -> None:
    def fill(writer: GGUFWriter) -> None:
        writer.add_block_count(7)
        writer.add_rope_freq_base(1e5)
        writer.add_tokenizer_model("gpt2")
        writer.add_add_bos_token(True)
        writer.add_token_list(["a", "", "\u00e9"])
        writer.add_token_types([1, 1, 3])
        writer.add_array("sizes", [1, 2, 3])

    metadata = open_gguf(write(tmp_path / "x.gguf", {}, fill)).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 7
    assert metadata["llama.rope.freq_base"] == 1e5
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Array) and tokens.count == 3
    assert tokens.values() == ["a", "", "\u00e9"]
    assert metadata["tokenizer.ggml.token_type"].values() == [1, 1, 3]
    assert metadata["sizes"].values() == [1, 2, 3]


def test_stored_types(tmp_path: Path) -> None:
    file = open_gguf(small(tmp_path / "x.gguf"))
    w, v = (file.tensors[name].lazy() for name in "wv")
    assert (w.dtype, v.dtype, v.read().dtype) == ("F32", "F16", np.float16)
    np.testing.assert_array_equal(w.read(), v.float32())
    assert not w.read().flags.owndata and not w.read().flags.writeable
    brain = np.arange(32, dtype=np.float32).reshape(1, 32).view(np.uint16)[:, 1::2].copy()
    packed = write(tmp_path / "y.gguf", {"b": (brain.view(np.uint8), "BF16")}, lambda w: None)
    found = open_gguf(packed).tensors["b"].lazy()
    assert (found.dtype, found.shape) == ("BF16", (1, 32))
    np.testing.assert_array_equal(found.read(), brain)


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType.Q1_0][1]
    data = np.zeros((1, size), np.uint8)
    file = write(tmp_path / "x.gguf", {"w": (data, "Q1_0")}, lambda writer: None)
    with pytest.raises(ArtifactError, match="tensor w is of type Q1_0, expected one of F32, F16"):
        open_gguf(file)


def test_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 and more")
    with pytest.raises(ArtifactError, match="not a GGUF file: it starts with b'PK"):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_version(version: int, tmp_path: Path) -> None:
    data = bytearray(small(tmp_path / "x.gguf").read_bytes())
    data[4:8] = struct.pack("<I", version)
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ArtifactError, match="expected 2 or 3, little endian"):
        open_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("position", [8, 16])
def test_a_huge_count_ends_at_the_end_of_the_file(position: int, tmp_path: Path) -> None:
    data = bytearray(small(tmp_path / "x.gguf").read_bytes())
    data[position : position + 8] = struct.pack("<Q", 2**63)
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(ArtifactError, match="not a valid GGUF file"):
        open_gguf(tmp_path / "x.gguf")


def array_header(kind: int, count: int) -> bytes:
    key = b"k"
    fields = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, count)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + fields


@pytest.mark.parametrize(("kind", "count"), [(0, 2**62), (8, 2**62), (9, 1), (12, 2**61), (77, 1)])
def test_hostile_arrays(kind: int, count: int, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(array_header(kind, count) + b"\0" * 64)
    with pytest.raises(ArtifactError, match="not a valid GGUF file"):
        open_gguf(tmp_path / "x.gguf")


Table = list[tuple[str, int, int]]  # name, offset and count of float32 values


def laid_out(path: Path, table: Table, data_bytes: int, alignment: int = 32) -> Path:
    """A file whose table places float32 vectors, before `data_bytes` of data."""
    key = b"general.alignment"
    header = b"GGUF" + struct.pack("<IQQ", 3, len(table), 1)
    header += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, alignment)
    for name, offset, count in table:
        header += struct.pack("<Q", len(name)) + name.encode()
        header += struct.pack("<IQIQ", 1, count, 0, offset)
    padding = -len(header) % alignment
    path.write_bytes(header + bytes(padding + data_bytes))
    return path


@pytest.mark.parametrize(
    ("table", "data_bytes"),
    [
        ([("a", 0, 5), ("b", 32, 8)], 64),
        ([("b", 32, 8), ("a", 0, 5)], 64),  # the table is in another order than the data
        ([("a", 0, 8), ("b", 32, 5)], 64),  # the last one padded
        ([("a", 0, 8), ("b", 32, 5)], 52),  # and not padded
        ([("a", 0, 0), ("b", 0, 5)], 32),  # no value, no byte
        ([], 0),
    ],
)
def test_tensors_with_nothing_but_padding_between(
    table: Table, data_bytes: int, tmp_path: Path
) -> None:
    found = open_gguf(laid_out(tmp_path / "x.gguf", table, data_bytes)).tensors
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: (count,) for name, _, count in table
    }


@pytest.mark.parametrize(
    ("table", "data_bytes", "message"),
    [
        (
            [("a", 0, 9), ("b", 32, 8)],
            64,
            r"'b' at byte \d+, expected \d+: overlaps the one before",
        ),
        ([("a", 0, 8), ("b", 0, 8)], 32, r"'b' at byte .*: overlaps"),
        ([("a", 32, 8), ("b", 64, 8)], 96, r"'a' at byte .*: leaves a gap before it"),
        ([("a", 0, 8), ("b", 64, 8)], 96, r"'b' at byte .*: leaves a gap"),
        ([("a", 0, 8), ("b", 32, 8)], 65, "1 bytes follow the last tensor"),
        ([("a", 0, 8)], 32 + 4096, "4,096 bytes follow the last tensor"),
        ([], 33, "33 bytes follow"),
        ([("a", 0, 8), ("b", 36, 8)], 68, "'b' lies at .* aligns tensors to 32"),
        ([("a", 2**64 - 32, 8)], 32, "'a' lies at bytes 18,446,744,073,709,551"),  # wraps to 0
        ([("a", 0, 2**48 - 1)], 32, "'a' lies at bytes"),
    ],
)
def test_tensors_that_overlap_or_leave_bytes_over(
    table: Table, data_bytes: int, message: str, tmp_path: Path
) -> None:
    file = laid_out(tmp_path / "x.gguf", table, data_bytes)
    with pytest.raises(ArtifactError, match=f"x.gguf: not a valid GGUF file: .*{message}"):
        open_gguf(file)


def test_a_file_of_another_alignment(tmp_path: Path) -> None:
    table = [("a", 0, 8), ("b", 256, 8)]
    assert open_gguf(laid_out(tmp_path / "x.gguf", table, 512, 256)).tensors.keys() == {"a", "b"}
    with pytest.raises(ArtifactError, match=r"'b' at byte .*: leaves a gap"):
        open_gguf(laid_out(tmp_path / "y.gguf", table, 512, 128))


def test_truncation_is_noticed_at_every_length(tmp_path: Path) -> None:
    file = small(tmp_path / "x.gguf")
    whole = file.read_bytes()
    for length in range(1, len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ArtifactError):
            open_gguf(file)


@given(position=st.integers(4, 10**6), value=st.integers(0, 255))
def test_damage_never_escapes(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    file = small(tmp_path_factory.mktemp("damage") / "x.gguf")
    data = bytearray(file.read_bytes())
    data[position % len(data)] = value
    file.write_bytes(data)
    try:
        found = open_gguf(file)
    except ArtifactError:
        return
    for tensor in found.tensors.values():
        assert tensor.lazy().read().shape == tensor.shape


def test_the_types_are_the_librarys() -> None:
    for number, (name, values, size) in gguf_file.TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (values, size)


def part(folder: Path, number: int, tensors: str, *, no: int | None = None, total: int = 3) -> Path:
    """A file of two that share a checkpoint; its tensors are named with a letter."""

    def fill(writer: GGUFWriter) -> None:
        writer.add_uint16("split.no", number - 1 if no is None else no)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", total)

    values = {name: (np.full(8, ord(name), np.float32), "F32") for name in tensors}
    return write(folder / f"m-0000{number}-of-00002.gguf", values, fill)


def test_the_parts_of_a_split_checkpoint_are_one(tmp_path: Path) -> None:
    first, second = part(tmp_path, 1, "ab"), part(tmp_path, 2, "c")
    for path in (first, second):
        found = open_gguf(path)
        assert found.path == first and list(found.tensors) == ["a", "b", "c"]
        assert found.tensors["c"].lazy().read().tolist() == [ord("c")] * 8


@pytest.mark.parametrize("name", ["m.gguf", "m-00001-of-00000.gguf"])
def test_a_file_that_parts_were_merged_to(name: str, tmp_path: Path) -> None:
    """llama-gguf-split --merge keeps split.count, as 0."""

    def fill(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", 0)

    path = write(tmp_path / name, {"a": (np.ones(8, np.float32), "F32")}, fill)
    assert parts_of(path) == [path]
    assert open_gguf(weights_file(path)).tensors["a"].lazy().read().tolist() == [1] * 8


@pytest.mark.parametrize(
    ("tensors", "other", "says"),
    [
        ("c", {"no": 0}, r"00002.gguf: .*split.no and split.count are \(0, 2\), expected \(1, 2\)"),
        ("b", {}, "tensor 'b' is in a part before it"),
        ("", {}, "its parts hold 2 tensors, expected 3"),
        ("cd", {}, "its parts hold 4 tensors, expected 3"),
    ],
)
def test_parts_that_contradict_each_other(
    tmp_path: Path, tensors: str, other: dict[str, int], says: str
) -> None:
    first = part(tmp_path, 1, "ab")
    part(tmp_path, 2, tensors, **other)
    with pytest.raises(ArtifactError, match=says):
        open_gguf(first)


def test_parts_that_are_missing_or_renamed(tmp_path: Path) -> None:
    first = part(tmp_path, 1, "ab")
    with pytest.raises(ArtifactError, match=r"one of 2 parts .* there is no m-00002-of-00002.gguf"):
        open_gguf(first)
    with pytest.raises(ArtifactError, match=r"one of 2 parts .* its name does not say which"):
        open_gguf(first.rename(tmp_path / "renamed.gguf"))


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
    # Found by their lengths' zeros, or walked over where those do not tell: the same strings.
    odd = ["", "\0", "\0" * 8, "x" * 255, "y" * 256, "z" * 70_000, "\u0120the", "\U0001f600"]
    usual = [f"{number} \u0120" for number in range(300)]
    every = [usual, odd, *([*usual, one, *usual] for one in odd), *([one] for one in odd)]
    for strings in every:
        texts = [one.encode() for one in strings]
        encoded = b"".join(struct.pack("<Q", len(one)) + one for one in texts)
        array = key(b"a", 9, struct.pack("<IQ", 8, len(texts)) + encoded)
        for behind in (b"", key(b"b", 7, b"\1"), key(b"b", 10, bytes(8))):
            path.write_bytes(header(1 + bool(behind), array + behind))
            found = read_metadata(path)
            assert found.pop("a") == strings
            assert list(found) == (["b"] if behind else [])


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
