"""Reads a MindIR without its weights by walking the protobuf's fields."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lite_runner.errors import ArtifactError
from lite_runner.system.protobuf import field, fields, parse_message, read_varint

MAX_KEPT = 64 * 2**20  # bytes of a graph without its values
MAX_NODE = 64 * 2**10  # a larger node is a constant table, which is not needed
_CUSTOM = b"func_type"  # an attribute of every custom operator, in a library or Python code
_CIPHER = b"\x5e\x3a\x7f"  # bytes 1 to 3 of a file that MindSpore encrypted
# Numbers of fields in MindSpore's mind_ir.proto, whose classes import all of MindSpore.
_GRAPH, _MODEL_VERSION, _MIND_IR_VERSION = 7, 5, 13  # of ModelProto
_NODE, _PARAMETER = 1, 3  # of GraphProto
_KEPT = {2, 5, 6}  # name, input, output
_SHAPE = {7, 1, 2}  # name, dims, data_type of TensorProto


def mindir_version(path: Path) -> int | None:
    """The version of a MindIR; None if the file has none, or is no MindIR."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, _, value, end in fields(data, 0, len(data)):
                if number == _MIND_IR_VERSION:
                    return read_varint(data, value, end)[0]
    except (OSError, ValueError):  # missing, empty, encrypted, ...
        return None
    return None


def read_model(path: Path) -> Any:
    """The ModelProto of a file: inputs, outputs, small nodes, and the name, type and shape of each
    parameter.

    Raises ArtifactError if it is missing, encrypted, no MindIR, of a newer version, or too large.
    """
    from mindspore.train import mind_ir_pb2

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[1:4] == _CIPHER:
                raise ArtifactError(
                    f"{path}: encrypted, and without a manifest that describes it",
                    "give the folder with its manifest.json and infer.enc_key",
                )
            model = parse_message(mind_ir_pb2.ModelProto, _model(data))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _TooLarge as error:
        raise ArtifactError(f"{path}: more than {MAX_KEPT} bytes without its weights") from error
    except ValueError as error:  # also what mmap says of an empty file
        raise ArtifactError(f"{path}: not a MindIR, or damaged: {error}") from error
    known = max(mind_ir_pb2.Version.values())
    if model.mind_ir_version > known:
        raise ArtifactError(
            f"{path}: MindIR version {model.mind_ir_version}, but this MindSpore reads at most "
            f"version {known}",
            "install the MindSpore that wrote it, or export the model again",
        )
    return model


class _TooLarge(ValueError):
    pass


def has_custom_operators(path: Path) -> bool:
    """True if a MindIR calls operators of a library that it names; not seen in an encrypted one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return any(data.find(_CUSTOM, *part) >= 0 for part in _beside_parameters(data))
            except ValueError:  # encrypted, or not a readable message
                return data.find(_CUSTOM) >= 0
    except (OSError, ValueError):  # missing or empty: MindSpore reports it
        return False


def _beside_parameters(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """The start and end of all fields of a model but its parameters, which may be large."""
    for number, _, value, end in fields(data, 0, len(data)):
        if number != _GRAPH:
            yield value, end
            continue
        for inner, _, start, last in fields(data, value, end):
            if inner != _PARAMETER:
                yield start, last


def _model(data: mmap.mmap) -> bytes:
    def parameter(start: int, end: int) -> bytes:
        return _kept(data, start, end, _SHAPE)

    def node(start: int, end: int) -> bytes:
        return data[start:end] if end - start <= MAX_NODE else b""

    def graph(start: int, end: int) -> bytes:
        return _kept(data, start, end, _KEPT, {_NODE: node, _PARAMETER: parameter})

    return _kept(data, 0, len(data), {_MODEL_VERSION, _MIND_IR_VERSION}, {_GRAPH: graph})


def _kept(
    data: mmap.mmap,
    start: int,
    end: int,
    whole: set[int],
    nested: dict[int, Callable[[int, int], bytes]] | None = None,
) -> bytes:
    """The message in data[start:end]: its `whole` fields, and `nested` ones as rewritten."""
    kept = bytearray()
    for number, first, value, last in fields(data, start, end):
        if nested and number in nested:
            inner = nested[number](value, last)
            kept += field(number, inner)
        elif number in whole:
            if last - first > MAX_KEPT:
                raise _TooLarge
            kept += data[first:last]
        if len(kept) > MAX_KEPT:
            raise _TooLarge
    return bytes(kept)
