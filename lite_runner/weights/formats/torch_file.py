"""PyTorch checkpoints (pytorch_model.bin): lazy views of tensors; no code in them is executed.

A file is a zip archive with ROOT/data.pkl, a pickle of tensors as strided views of storages, and
ROOT/data/KEY, the uncompressed bytes of each storage; or, before release 1.6, five pickles followed
by the storages. An allowlist of opcodes, names and calls covers dictionaries, tensors and their
storages; any other is refused: no other object is created, nothing imported, no code executed.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights import DType, Index, LazyTensor, drop_pages, first_bytes, map_file
from lite_runner.weights.formats.packed_layouts import tensor_type_error
from lite_runner.weights.formats.safetensors_file import ITEM_BYTES, NUMPY_TYPES, view_tensor

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
_LOCAL_HEADER = 30  # bytes before the name of a member
_PICKLE_ERRORS = (ValueError, OverflowError, IndexError, struct.error)
# PyTorch's storage class -> safetensors' name of the dtype.
STORAGES = {
    "BFloat16Storage": "BF16",
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "ShortStorage": "I16",
}
_ORDERED_DICT = "collections.OrderedDict"
_TENSOR, _PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
_NAMES = {_ORDERED_DICT, _TENSOR, _PARAMETER, *(f"torch.{name}" for name in STORAGES)}
MAX_READ = 64 * 2**20  # bytes of a pickle, and of an archive's directory
MAX_LINE = 4096  # bytes of a name in a pickle
MAX_OPCODES = 4_000_000  # enough for about 100,000 tensors


def looks_like_torch(path: Path) -> bool:
    """True if the file starts as a zip archive or a pickle."""
    start = first_bytes(path, 4)
    return start == _ZIP or start[:1] == _PICKLE


def open_torch(
    path: Path, ignore: Callable[[str], bool] = lambda name: False
) -> dict[str, LazyTensor]:
    """Every tensor of a dictionary of tensors that torch.save wrote, as lazy views.

    Tensors whose name `ignore` accepts are left out; the others must be F32, F16 or BF16. Raises
    ArtifactError if the file is damaged, or holds anything but tensors.
    """
    try:
        if first_bytes(path, 4) == _ZIP:
            found, storages = _read_zip(path)
        else:
            found, storages = _read_legacy(path)
    except zipfile.BadZipFile as error:
        raise ArtifactError(
            f"{path}: a damaged zip archive: {error}", "fetch the file again"
        ) from error
    except (NotTensors, NotImplementedError, OSError, ValueError) as error:
        raise refused(path, str(error)) from error
    if not isinstance(found, dict) or not found:
        raise refused(path, f"it holds a {type(found).__name__}, expected a dictionary of tensors")
    tensors = {}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Strided):
            kind = type(value).__name__
            raise refused(path, f"{str(name)[:80]!r} is a {kind}, expected a name and a tensor")
        if ignore(name):
            continue
        dtype = value.storage.dtype
        if dtype not in NUMPY_TYPES:
            raise tensor_type_error(
                path, name, dtype, [one for one in found if isinstance(one, str)]
            )
        tensors[name] = _lazy(value, dtype, _stored(path, name, value, storages))
    return tensors


def refused(path: Path, reason: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: a pickle, which can run any code when it is loaded: only plain tensors are taken "
        f"from one, and {reason}; nothing of it was run",
        "take the model's .safetensors files, or make them where you trust the file: "
        "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)",
    )


class _Bounded(io.BufferedReader):
    """A file with a limit on the bytes read, which no valid pickle or zip directory exceeds."""

    left = MAX_READ

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = self.left + 1 if size is None or size < 0 else min(size, self.left + 1)
        data = super().read(wanted)
        self.left -= len(data)
        if self.left < 0:
            raise NotTensors(f"its pickle or directory has more than {MAX_READ:,} bytes")
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        self.left -= MAX_LINE
        return super().readline(MAX_LINE) if self.left > 0 else b""


def _read_zip(path: Path) -> tuple[Any, dict[str, NDArray[np.uint8]]]:
    """The value of data.pkl, and the bytes of each storage by its key."""
    members = _members(path)
    roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl")]
    if len(roots) != 1:
        raise NotTensors(f"the archive holds {len(roots)} files data.pkl, expected one")
    order = members.get(f"{roots[0]}/byteorder")
    if order is not None and order.tobytes() != b"little":
        raise NotTensors("its numbers are not little-endian")
    pickled = members[f"{roots[0]}/data.pkl"]
    if pickled.size > MAX_READ:
        raise NotTensors(f"its pickle has {pickled.size:,} bytes")
    start = f"{roots[0]}/data/"
    storages = {
        name.removeprefix(start): data for name, data in members.items() if name.startswith(start)
    }
    return interpret(io.BytesIO(pickled.tobytes())), storages


def _members(path: Path) -> dict[str, NDArray[np.uint8]]:
    """The members of the archive by name, as views of the file, none of which overlap."""
    data = map_file(path)
    with _Bounded(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
        infos, end = archive.infolist(), archive.start_dir
    found: dict[str, NDArray[np.uint8]] = {}
    last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        name, offset = info.filename, info.header_offset
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise NotTensors(f"{name[:80]!r} is compressed or encrypted")
        header = data[max(offset, 0) : offset + _LOCAL_HEADER].tobytes()
        if offset < last or len(header) < _LOCAL_HEADER or not header.startswith(_ZIP):
            raise NotTensors(f"{name[:80]!r} overlaps another member, or has no header")
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = offset + _LOCAL_HEADER + sum(lengths)
        last = start + info.file_size
        if info.compress_size != info.file_size or last > end or name in found:
            raise NotTensors(f"{name[:80]!r} reaches beyond the archive, or is there twice")
        found[name] = data[start:last]
    return found


def _read_legacy(path: Path) -> tuple[Any, dict[str, NDArray[np.uint8]]]:
    """As `_read_zip`, of a file from before release 1.6."""
    data = map_file(path)
    with _Bounded(io.FileIO(path)) as file:
        if interpret(file) != _LEGACY_MAGIC or interpret(file) != _LEGACY_VERSION:
            raise NotTensors("it is not one of PyTorch's")
        system = interpret(file)
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise NotTensors("its numbers are not little-endian")
        found, keys, position = interpret(file), interpret(file), file.tell()
    values = found.values() if isinstance(found, dict) else ()
    needed = {one.storage.key: one.storage for one in values if isinstance(one, Strided)}
    is_names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not is_names or set(keys) != set(needed):
        raise NotTensors("its storages are not those of its tensors")
    storages = {}
    for key in keys:  # each preceded by its number of values
        size = needed[key].numel * ITEM_BYTES[needed[key].dtype]
        count = int.from_bytes(data[position : position + 8].tobytes(), "little")
        storages[key] = data[position + 8 : position + 8 + size]
        if count != needed[key].numel or storages[key].size != size:
            raise NotTensors(f"its storage {key[:40]!r} is cut off, or of another size")
        position += 8 + size
    return found, storages


def _stored(
    path: Path, name: str, tensor: Strided, storages: Mapping[str, NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    stored = storages.get(tensor.storage.key)
    needed = tensor.storage.numel * ITEM_BYTES[tensor.storage.dtype]
    if stored is None or stored.size != needed:
        held = "no" if stored is None else f"{stored.size:,}"
        raise ArtifactError(
            f"{path}: tensor {name} lies in a storage of {needed:,} bytes, the file holds {held} "
            "bytes of it",
            "the file is damaged: fetch or write it again",
        )
    return stored


def _lazy(tensor: Strided, dtype: DType, stored: NDArray[np.uint8]) -> LazyTensor:
    """The tensor as a view of its storage; a non-contiguous one is copied when read."""
    shape, item, count = tensor.shape, ITEM_BYTES[dtype], math.prod(tensor.shape)
    start = tensor.offset * item
    if tensor.strides == _contiguous(shape) or not count:
        return view_tensor(stored[start : start + count * item], dtype, shape)

    def part(index: Index) -> NDArray[Any]:
        values: NDArray[Any] = stored.view(NUMPY_TYPES[dtype])[tensor.offset :]
        strides = [item * stride for stride in tensor.strides]
        whole = np.lib.stride_tricks.as_strided(values, shape, strides, writeable=False)
        copied = np.array(whole[index] if index else whole, order="C")
        drop_pages(stored)
        return copied

    return LazyTensor(shape, dtype, lambda: part(()), part)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class NotTensors(Exception):
    """The pickle is broken or holds other objects than tensors; the message names them."""


@dataclass(frozen=True)
class Storage:
    """The memory of one or more tensors: `numel` values of type `dtype`, named `key`."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True)
class Strided:
    """A tensor: value i, j, ... is at `offset` + i * strides[0] + j * strides[1] ... in `storage`;
    all of them lie inside it."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Name:
    """One of `_NAMES`; it is never resolved to a Python object."""

    text: str


class _Ordered(dict[Any, Any]):
    """An OrderedDict without its attributes."""


def interpret(stream: IO[bytes]) -> Any:
    """The value of the next pickle in `stream`: None, booleans, numbers, strings, tuples, lists,
    dictionaries and `Strided`, nested; afterwards the stream is positioned behind the pickle.

    Raises NotTensors.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
            if count == MAX_OPCODES:
                raise NotTensors(f"it has more than {MAX_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return machine.pop()
            action = _ACTIONS.get(opcode.name)
            if action is None:
                raise NotTensors(f"opcode {opcode.name} at byte {position:,}")
            action(machine, argument)
    except _PICKLE_ERRORS as error:
        raise NotTensors(f"it is broken: {str(error)[:120]}") from error
    raise NotTensors("it has no end")


class _Machine:
    """The stack and the memo of the pickle protocol."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # stack lengths at marks
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise NotTensors("it is broken: it pops more than it has pushed")
        return self.stack.pop()

    def top(self, kind: type | tuple[type, ...] = object) -> Any:
        """The top of the stack, which must be a `kind`."""
        value = self.pop()
        if not isinstance(value, kind):
            raise NotTensors(f"it changes a {type(value).__name__}")
        self.push(value)
        return value

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise NotTensors("it is broken: a mark is missing")
        start = self.marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def name(self, module: Any, name: Any) -> None:
        text = f"{module}.{name}"
        if text not in _NAMES:
            raise NotTensors(f"it names {text[:100]}")
        self.push(_Name(text))

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise NotTensors(f"it is broken: the memo has no {index}")
        self.push(self.memo[index])

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        keys = pairs[::2]
        if len(pairs) % 2 or not all(type(key) in (str, int) for key in keys):
            raise NotTensors("a key of a dictionary is neither a string nor an integer")
        self.top(dict).update(zip(keys, pairs[1::2], strict=True))

    def build(self) -> None:
        """The attributes of an OrderedDict, which say which releases wrote which module."""
        if not isinstance(self.pop(), dict):
            raise NotTensors("attributes that are not a dictionary")
        self.top(_Ordered)

    def storage(self) -> None:
        match self.pop():
            case ("storage", _Name(kind), str(key), str(), int(numel), *view) if (
                kind.removeprefix("torch.") in STORAGES and numel >= 0 and view in ([], [None])
            ):
                self.push(Storage(key, STORAGES[kind.removeprefix("torch.")], numel))
            case other:
                raise NotTensors(f"a reference that is not a storage: {str(type(other))[:60]}")

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        match function, arguments:
            case _Name(text), () if text == _ORDERED_DICT:
                self.push(_Ordered())
            case _Name(text), (
                Storage() as storage,
                offset,
                shape,
                strides,
                bool(),
                dict() as hooks,
                *more,
            ) if text == _TENSOR and not hooks and more in ([], [None]):
                self.push(_strided(storage, offset, shape, strides))
            case _Name(text), (Strided() as tensor, bool(), dict() as hooks) if (
                text == _PARAMETER and not hooks
            ):
                self.push(tensor)
            case _:
                called = function.text if isinstance(function, _Name) else type(function).__name__
                raise NotTensors(f"it calls {called} with arguments that are not known")


def _strided(storage: Storage, offset: Any, shape: Any, strides: Any) -> Strided:
    """A tensor, validated to lie inside its storage and to have no more values than it."""
    plain = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not plain or len(shape) > 32:
        raise NotTensors("a tensor without a plain shape")
    numbers = (offset, *shape, *strides)
    if not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
        raise NotTensors("a tensor with an impossible shape")
    count = 1
    for size in shape:
        count *= size
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if count and (count > storage.numel or last >= storage.numel):
        raise NotTensors(
            f"a tensor {list(shape)} reaches beyond its storage of {storage.numel:,} values"
        )
    return Strided(storage, offset, shape, strides)


def _remember(machine: _Machine, index: int | None) -> None:
    machine.memo[len(machine.memo) if index is None else index] = machine.top()


def _stack_name(machine: _Machine, argument: None) -> None:
    name = machine.pop()
    machine.name(machine.pop(), name)


_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), lambda machine, argument: None),
    **dict.fromkeys(
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
            *("BINUNICODE", "SHORT_BINUNICODE"),
        ),
        _Machine.push,
    ),
    "NONE": lambda machine, argument: machine.push(None),
    "NEWTRUE": lambda machine, argument: machine.push(True),
    "NEWFALSE": lambda machine, argument: machine.push(False),
    "EMPTY_DICT": lambda machine, argument: machine.push({}),
    "EMPTY_LIST": lambda machine, argument: machine.push([]),
    "EMPTY_TUPLE": lambda machine, argument: machine.push(()),
    "MARK": lambda machine, argument: machine.marks.append(len(machine.stack)),
    "TUPLE": lambda machine, argument: machine.push(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, argument: machine.push((machine.pop(),)),
    "TUPLE2": lambda machine, argument: machine.push((machine.pop(), machine.pop())[::-1]),
    "TUPLE3": lambda machine, argument: machine.push(
        (machine.pop(), machine.pop(), machine.pop())[::-1]
    ),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "APPEND": lambda machine, argument: machine.append([machine.pop()]),
    "APPENDS": lambda machine, argument: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, argument: machine.set_items([machine.pop(), machine.pop()][::-1]),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.pop_to_mark()),
    "GLOBAL": lambda machine, argument: machine.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _stack_name,
    "BINPERSID": lambda machine, argument: machine.storage(),
    "REDUCE": lambda machine, argument: machine.reduce(),
    "BUILD": lambda machine, argument: machine.build(),
}
