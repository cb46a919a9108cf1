"""PyTorch's files: real ones are read, and no code of a pickle is run."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.weights.checkpoint import model_config_in, open_checkpoint
from lite_runner.weights.formats import TORCH_INDEX
from lite_runner.weights.formats.hugging_face import is_buffer
from lite_runner.weights.formats.safetensors_file import open_safetensors
from lite_runner.weights.formats.torch_file import open_torch
from tests.each import each
from tests.paths import FIXTURES

TORCH = FIXTURES / "torch"
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)
# Files as torch.save writes them, opcode by opcode: sound ones, and such as it would not write.
CLASSES = {"float32": "FloatStorage", "float16": "HalfStorage", "uint16": "BFloat16Storage"}


def named(module: str, attribute: str) -> bytes:
    return b"c" + f"{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str, kind: str, numel: int) -> bytes:
    return (
        b"("
        + text("storage")
        + named("torch", kind)
        + text(key)
        + text("cpu")
        + number(numel)
        + b"tQ"
    )


def tensor(held: bytes, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    rest = number(offset) + numbers(shape) + numbers(strides) + b"\x89"
    rest += named("collections", "OrderedDict") + b")R"
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + held + rest + b"tR"


def pickled(entries: Mapping[str, bytes]) -> bytes:
    """A pickle of a dictionary, of what is given as opcodes."""
    body = b"".join(text(key) + value for key, value in entries.items())
    return b"\x80\x02}(" + body + b"u."


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for key, content in members.items():
            file.writestr(f"archive/{key}", content)
    return stream.getvalue()


def torch_file(arrays: Mapping[str, NDArray]) -> bytes:
    """The bytes that torch.save writes of tensors; uint16 are the bits of bfloat16."""
    entries, members = {}, {}
    for index, (key, array) in enumerate(arrays.items()):
        strides = tuple(int(np.prod(array.shape[axis + 1 :])) for axis in range(array.ndim))
        held = storage(str(index), CLASSES[array.dtype.name], array.size)
        entries[key] = tensor(held, array.shape, strides)
        members[f"data/{index}"] = array.tobytes()
    return archive({"data.pkl": pickled(entries), **members})


ONE = tensor(storage("0", "FloatStorage", 4), (2, 2), (2, 1))
LEGACY = (  # magic number, version, and the system's sizes
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
    b"\x80\x02M\xe9\x03.",
    b"\x80\x02}X\r\0\0\0little_endian\x88s.",
)
DATA = {"data/0": np.arange(4, dtype=np.float32).tobytes()}


@pytest.mark.parametrize("name", ["zip", "legacy", "protocol_4"])
def test_files_of_torch_are_read(name: str) -> None:
    found = open_torch(TORCH / f"{name}.bin", is_buffer)
    expected = {
        **dict.fromkeys(("plain", "tied"), BASE),
        "half": BASE.astype(np.float16),
        "transposed": BASE.T,
        "part": BASE[1:3, 2:5],
        "parameter": BASE + 1,
        "scalar": np.float32(2.5),
        "empty": np.empty((0, 3), np.float32),
    }
    assert found.keys() == {*expected, "bfloat16"}
    for key, values in expected.items():
        array = found[key].read()
        assert array.flags.c_contiguous and array.dtype == values.dtype
        np.testing.assert_array_equal(array, values)
    assert found["bfloat16"].dtype == "BF16"
    np.testing.assert_array_equal(found["bfloat16"].float32(), BASE)
    rows = found["transposed"].piece((slice(1, 3),))
    np.testing.assert_array_equal(rows, BASE.T[1:3])


def test_a_state_dict_keeps_attributes_that_are_left_out() -> None:
    found = open_torch(TORCH / "state_dict.bin")
    assert {name: one.shape for name, one in found.items()} == {"weight": (2, 3), "bias": (2,)}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("module", "it names torch.nn.modules.linear.Linear"),
        ("sparse", "it names torch._utils._rebuild_sparse_tensor"),
        ("expanded", r"a tensor \[3, 4, 6\] reaches beyond its storage of 24 values"),
        ("double", "tensor double is F64, expected one of F32, F16, BF16"),
        ("training", "'step' is a int, expected a name and a tensor"),
    ],
)
def test_anything_but_plain_tensors_is_refused(name: str, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        open_torch(TORCH / f"{name}.bin")


@pytest.mark.parametrize("case", ["bloom", "gpt2", "llama"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_folder_with_pytorch_model_bin(case: str, shards: int, tmp_path: Path) -> None:
    folder = FIXTURES / "reference" / case
    config = model_config_in(folder)
    assert config is not None
    stored = open_safetensors(folder / "model.safetensors", is_buffer)
    arrays = {name: tensor.read() for name, tensor in stored.items()}
    names = list(arrays)
    files = {}
    for index in range(shards):
        file = (
            f"pytorch_model-{index + 1:05}-of-{shards:05}.bin"
            if shards > 1
            else "pytorch_model.bin"
        )
        files |= dict.fromkeys(names[index::shards], file)
        part = {name: arrays[name] for name in names[index::shards]}
        (tmp_path / file).write_bytes(torch_file(part))
    if shards > 1:
        (tmp_path / TORCH_INDEX).write_text(json.dumps({"weight_map": files}))
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x02.")
    expected = open_checkpoint(folder, config)
    found = open_checkpoint(tmp_path, config)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].read(), tensor.read())
    (tmp_path / files[names[-1]]).unlink()
    with pytest.raises(ArtifactError):
        open_checkpoint(tmp_path, config)


SYSTEM = named("os", "system") + b"(" + text("touch pwned") + b"tR"
HOSTILE = {
    "it names os.system": SYSTEM,
    "it names posix.system": b"cposix\nsystem\n(" + text("touch pwned") + b"tR",
    "it names builtins.getattr": named("builtins", "getattr"),
    "it names builtins.eval": text("builtins") + text("eval") + b"\x93",
    "it names torch.load": named("torch", "load"),
    "it names torch.storage._load_from_bytes": named("torch.storage", "_load_from_bytes"),
    "it calls torch.FloatStorage": named("torch", "FloatStorage") + b")R",
    "it calls collections.OrderedDict": named("collections", "OrderedDict") + b"(K\x01tR",
    "it calls str": text("os.system") + b")R",
    "opcode INST": b"(ios\nsystem\n",
    "opcode OBJ": b"(" + named("collections", "OrderedDict") + b"o",
    "opcode NEWOBJ": named("collections", "OrderedDict") + b")\x81",
    "opcode EXT1": b"\x82\x01",
    "opcode INT": b"I5\n",
    "opcode PERSID": b"Pkey\n",
    "it changes a dict": b"}}b",
    "attributes that are not a dictionary": named("collections", "OrderedDict") + b")RK\x01b",
    "a key of a dictionary is neither": b"})K\x01s",
    "it changes a int": b"K\x01K\x02a",
    "a reference that is not a storage": b"K\x01Q",
    "the memo has no 7": b"h\x07",
    "it pops more than it has pushed": b"\x87\x87",
    "a mark is missing": b"t",
    "reaches beyond its storage of 4": tensor(storage("0", "FloatStorage", 4), (2, 2), (2, 2)),
    "beyond its storage of 4 values": tensor(
        storage("0", "FloatStorage", 4), (2, 2), (2, 1), offset=1
    ),
    "an impossible shape": tensor(storage("0", "FloatStorage", 4), (2, -2), (2, 1)),
    "without a plain shape": tensor(storage("0", "FloatStorage", 4), (2, 2), (1,)),
    "storage of 400 bytes, the file holds 16": tensor(
        storage("0", "FloatStorage", 100), (2, 2), (2, 1)
    ),
    "the file holds no bytes": tensor(storage("../0", "FloatStorage", 4), (4,), (1,)),
    "expected a name and a tensor": b"]",
}


@each("refusal", HOSTILE)
def test_a_hostile_pickle_is_refused(refusal: str, tmp_path: Path) -> None:
    pickle = pickled({"good": ONE, "bad": HOSTILE[refusal]})
    Path("x.bin").write_bytes(archive({"data.pkl": pickle, **DATA}))
    with pytest.raises(ArtifactError) as caught:
        open_torch(Path("x.bin"))
    assert refusal in caught.value.message and "\n" not in caught.value.message
    # Not zipped it is no file of an older release either.
    Path("x.bin").write_bytes(pickle)
    with pytest.raises(ArtifactError, match="nothing of it was run"):
        open_torch(Path("x.bin"))
    assert [file.name for file in tmp_path.iterdir()] == ["x.bin"]


def test_a_sound_pickle_with_a_huge_memo_index(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pickle = pickled({"good": ONE + b"r\xff\xff\xff\x7f"})
    path.write_bytes(archive({"data.pkl": pickle, **DATA}))
    assert open_torch(path)["good"].read().tolist() == [[0, 1], [2, 3]]


def test_a_deep_pickle_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    pickle = pickled({"deep": b")" + b"\x85" * 300_000})
    path.write_bytes(archive({"data.pkl": pickle}))
    with pytest.raises(ArtifactError, match="'deep' is a tuple"):
        open_torch(path)


def test_a_long_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(archive({"data.pkl": pickled({"x": b"]" + b"Na" * 500})}))
    monkeypatch.setattr("lite_runner.weights.formats.torch_file.MAX_OPCODES", 100)
    with pytest.raises(ArtifactError, match="more than 100 opcodes"):
        open_torch(path)


def damaged(kind: str) -> bytes:
    """A sound archive, changed."""
    sound = archive({"data.pkl": pickled({"x": ONE}), **DATA})
    if kind == "compressed":
        return archive({"data.pkl": pickled({"x": ONE}), **DATA}, zipfile.ZIP_DEFLATED)
    if kind == "big-endian":
        return archive({"data.pkl": pickled({"x": ONE}), "byteorder": b"big", **DATA})
    if kind == "two pickles":
        pickle = pickled({"x": ONE})
        return archive({"data.pkl": pickle, "more/data.pkl": pickle})
    if kind == "cut off":
        return sound[:-30]
    entry = sound.rindex(b"PK\x01\x02")  # of the storage, in the directory
    changed = bytearray(sound)
    if kind == "name":
        changed[entry + 8 : entry + 10] = (1 << 11).to_bytes(2, "little")  # says that it is UTF-8
        changed[entry + 46] = 0xFF
    elif kind == "overlapping":  # the storage claims to begin where the pickle does
        changed[entry + 42 : entry + 46] = bytes(4)
    elif kind == "beyond":
        changed[entry + 20 : entry + 28] = (1 << 20).to_bytes(4, "little") * 2
    return bytes(changed)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("compressed", "is compressed or encrypted"),
        ("big-endian", "not little-endian"),
        ("two pickles", "2 files data.pkl"),
        ("cut off", r"x\.bin: a damaged zip archive: .*not a zip file\n.*fetch the file again"),
        ("overlapping", "overlaps another member"),
        ("name", "can't decode byte 0xff"),
        ("beyond", "reaches beyond the archive"),
    ],
)
def test_a_damaged_archive_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(damaged(kind))
    with pytest.raises(ArtifactError, match=message):
        open_torch(path)


@pytest.mark.parametrize(
    "keys",
    # [5], [[]], ["0", 5], {}, ["1"]
    [b"]K\x05a", b"]]a", b"]X\x01\x00\x00\x000aK\x05a", b"}", b"]X\x01\x00\x00\x001a"],
)
def test_a_legacy_file_with_storages_of_other_names(keys: bytes, tmp_path: Path) -> None:
    held = b"\x80\x02" + keys + b"."
    (tmp_path / "x.bin").write_bytes(b"".join([*LEGACY, pickled({"x": ONE}), held]))
    with pytest.raises(ArtifactError, match="its storages are not those of its tensors"):
        open_torch(tmp_path / "x.bin")


@given(
    name=st.sampled_from(["zip.bin", "legacy.bin", "state_dict.bin"]),
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4),
)
@settings(max_examples=150)
def test_any_damage_is_an_artifact_error(
    name: str, changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    shutil.copyfile(TORCH / name, path)
    data = bytearray(path.read_bytes())
    for position, value in changes:
        data[position % len(data)] = value
    path.write_bytes(data)
    try:
        for tensor in open_torch(path, is_buffer).values():
            assert tensor.read().shape == tensor.shape
    except ArtifactError:
        pass
