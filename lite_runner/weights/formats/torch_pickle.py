"""Interprets the pickle of a PyTorch checkpoint, without unpickling it.

An allowlist of opcodes, names and calls covers dictionaries, tensors and their storages: no other
object is created, nothing is imported, no code is executed. Any other opcode, name or call is
refused.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from typing import IO, Any

from lite_runner.records import dataclass

MAX_OPCODES = 4_000_000  # about a hundred thousand tensors
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


class NotTensors(Exception):
    """The pickle is broken or holds anything but tensors; the message says what."""


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
        self.marks: list[int] = []  # lengths of the stack
        self.memo: dict[int, Any] = {}

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise NotTensors("it is broken: it takes more than it has made")
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
            raise NotTensors(f"it is broken: nothing was remembered as {index}")
        self.push(self.memo[index])

    def append(self, values: list[Any]) -> None:
        self.top(list).extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        keys = pairs[::2]
        if len(pairs) % 2 or not all(type(key) in (str, int) for key in keys):
            raise NotTensors("a key of a dictionary is neither a text nor a number")
        self.top(dict).update(zip(keys, pairs[1::2], strict=True))

    def build(self) -> None:
        """The attributes of an OrderedDict, which say which releases wrote which module."""
        if not isinstance(self.pop(), dict):
            raise NotTensors("attributes that are no dictionary")
        self.top(_Ordered)

    def storage(self) -> None:
        match self.pop():
            case ("storage", _Name(kind), str(key), str(), int(numel), *view) if (
                kind.removeprefix("torch.") in STORAGES and numel >= 0 and view in ([], [None])
            ):
                self.push(Storage(key, STORAGES[kind.removeprefix("torch.")], numel))
            case other:
                raise NotTensors(f"a reference that is no storage: {str(type(other))[:60]}")

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
    """A tensor validated to lie inside its storage, and to have at most as many values."""
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
