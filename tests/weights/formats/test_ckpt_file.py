from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.errors import ArtifactError
from lite_runner.system.protobuf import field, varint
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats import ckpt_file
from lite_runner.weights.formats.ckpt_file import looks_like_ckpt, open_ckpt, write_ckpt


def lazy(array: np.ndarray, dtype: Any = "F32") -> LazyTensor:
    return LazyTensor(array.shape, dtype, lambda: array)


def sample() -> dict[str, LazyTensor]:
    bits = np.array([[0x3F80, 0xC000, 0x7FC1]], np.uint16)
    return {
        "w": lazy(np.arange(300, dtype=np.float32).reshape(20, 15)),
        "half": lazy(np.linspace(0, 1, 7, dtype=np.float16), "F16"),
        "brain": lazy(bits, "BF16"),
    }


def check(found: dict[str, LazyTensor], expected: dict[str, LazyTensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        assert found[name].read().tobytes() == tensor.read().tobytes()


def test_round_trip(tmp_path: Path) -> None:
    write_ckpt(tmp_path / "x.ckpt", sample())
    assert looks_like_ckpt(tmp_path / "x.ckpt")
    check(open_ckpt(tmp_path / "x.ckpt"), sample())


def test_mindspore_reads_what_is_written(tmp_path: Path) -> None:
    import mindspore

    write_ckpt(tmp_path / "x.ckpt", sample())
    found = mindspore.load_checkpoint(str(tmp_path / "x.ckpt"))
    assert list(found) == ["w", "half", "brain"]
    np.testing.assert_array_equal(found["w"].asnumpy(), sample()["w"].read())
    np.testing.assert_array_equal(found["half"].asnumpy(), sample()["half"].read())
    assert found["brain"].dtype == mindspore.bfloat16
    assert found["brain"].asnumpy().tobytes() == sample()["brain"].read().tobytes()


def test_reads_what_mindspore_writes(tmp_path: Path) -> None:
    import mindspore
    from mindspore import Parameter, Tensor

    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    parameters = [
        {"name": "w", "data": Parameter(Tensor(w), name="w")},
        {"name": "brain", "data": Parameter(Tensor([1.0, -2.0], mindspore.bfloat16), name="brain")},
        {"name": "half", "data": Parameter(Tensor(w.astype(np.float16)), name="half")},
        {"name": "global_step", "data": Parameter(Tensor(3, mindspore.int32), name="global_step")},
        {
            "name": "loss_scale",
            "data": Parameter(Tensor(2.0, mindspore.float32), name="loss_scale"),
        },
    ]
    mindspore.save_checkpoint(parameters, str(tmp_path / "x.ckpt"), crc_check=True)
    found = open_ckpt(tmp_path / "x.ckpt")
    assert list(found) == ["w", "brain", "half", "loss_scale"]  # counters are no weights
    np.testing.assert_array_equal(found["w"].read(), w)
    np.testing.assert_array_equal(found["half"].read(), w.astype(np.float16))
    assert found["brain"].float32().tolist() == [1.0, -2.0]
    assert found["loss_scale"].shape == ()


def test_large_tensors_are_cut_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mindspore

    monkeypatch.setattr(ckpt_file, "SLICE", 256)
    write_ckpt(tmp_path / "x.ckpt", sample())
    check(open_ckpt(tmp_path / "x.ckpt"), sample())
    found = mindspore.load_checkpoint(str(tmp_path / "x.ckpt"))
    np.testing.assert_array_equal(found["w"].asnumpy(), sample()["w"].read())


def test_checksum(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    write_ckpt(file, sample())
    content = file.read_bytes()
    file.write_bytes(content + b"crc_num" + zlib.crc32(content).to_bytes(10, "big"))
    check(open_ckpt(file), sample())
    damaged = bytearray(file.read_bytes())
    damaged[100] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ArtifactError, match="the checksum is 0x"):
        open_ckpt(file)


def test_truncation_is_noticed_or_whole_tensors_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    write_ckpt(file, sample())
    whole = file.read_bytes()
    for length in range(1, len(whole), 7):
        file.write_bytes(whole[:length])
        try:
            found = open_ckpt(file)
        except ArtifactError as error:
            assert str(file) in str(error)
        else:  # cut exactly between two tensors
            assert len(found) < 3


def test_shape_and_content_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    write_ckpt(file, {"w": LazyTensor((4,), "F32", lambda: np.ones(4, np.float32))})
    file.write_bytes(file.read_bytes().replace(b"\x08\x04", b"\x08\x05"))  # its only dimension
    with pytest.raises(ArtifactError, match=r"w \[5\] F32 needs 20 bytes, the file holds 16"):
        open_ckpt(file)


def test_a_name_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ckpt(tmp_path / "x.ckpt", sample())
    monkeypatch.setattr(ckpt_file, "MAX_TEXT", 8)  # of BFloat16
    check(open_ckpt(tmp_path / "x.ckpt"), sample())
    monkeypatch.setattr(ckpt_file, "MAX_TEXT", 4)
    with pytest.raises(ArtifactError, match=r"the name at byte \d+ has \d bytes"):
        open_ckpt(tmp_path / "x.ckpt")


def test_a_tensor_that_occurs_twice(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    write_ckpt(file, sample())
    file.write_bytes(file.read_bytes() * 2)
    with pytest.raises(ArtifactError, match="'w' occurs twice"):
        open_ckpt(file)


@pytest.mark.parametrize(
    ("dims", "values"),
    [((0,), (b"ab", b"cd")), ((0, 5), (b"", b"")), ((3, 0), (b"", b"")), ((0,), (b"", b""))],
)
def test_a_tensor_without_rows_is_not_cut(
    dims: tuple[int, ...], values: tuple[bytes, ...], tmp_path: Path
) -> None:
    content = b""
    for value in values:
        held = b"".join(b"\x08" + varint(size) for size in dims)
        held += field(2, b"Float32") + field(3, value)
        content += field(1, field(1, b"w") + field(2, held))
    (tmp_path / "x.ckpt").write_bytes(content)
    with pytest.raises(ArtifactError, match="'w' occurs twice"):
        open_ckpt(tmp_path / "x.ckpt")


@given(position=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 200))
def test_damage_never_escapes(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, cut: int
) -> None:
    file = tmp_path_factory.mktemp("damage") / "x.ckpt"
    write_ckpt(file, sample())
    data = bytearray(file.read_bytes())[cut:]
    data[position % min(len(data), 60)] = value
    file.write_bytes(data)
    try:
        found = open_ckpt(file)
    except ArtifactError:
        return
    for tensor in found.values():
        assert tensor.read().shape == tensor.shape


@given(data=st.binary(min_size=1, max_size=200))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.mktemp("any") / "x.ckpt"
    file.write_bytes(data)
    try:
        open_ckpt(file)
    except ArtifactError as error:
        assert error.exit_code == 4


def test_slices_of_a_tensor_in_several_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces that begin and end inside of values, and writing them on in chunks of another size."""
    values = np.arange(60, dtype=np.float32).reshape(12, 5)
    monkeypatch.setattr(ckpt_file, "SLICE", 28)
    write_ckpt(tmp_path / "x.ckpt", {"w": LazyTensor((12, 5), "F32", lambda: values)})
    tensor = open_ckpt(tmp_path / "x.ckpt")["w"]
    assert np.array_equal(tensor.read(), values)
    for first in range(12):
        for end in range(first, 13):
            for columns in (slice(None), slice(1, 4)):
                found = tensor.piece((slice(first, end), columns))
                assert np.array_equal(found, values[first:end, columns])
                assert found.flags.c_contiguous and found.flags.aligned
    monkeypatch.setattr(ckpt_file, "CHUNK", 48)
    write_ckpt(tmp_path / "y.ckpt", {"w": tensor})
    assert (tmp_path / "y.ckpt").read_bytes() == (tmp_path / "x.ckpt").read_bytes()
