"""Matrices quantized, or rounded to 16 bits, when they are read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.naming import Role
from lite_runner.architectures.quantization import Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.config import sections
from lite_runner.errors import ArtifactError
from lite_runner.weights import (
    LIMITS,
    DType,
    LazyIntegers,
    LazyTensor,
    drop_pages,
    narrowed,
    widened,
)
from lite_runner.weights.formats.safetensors_file import NUMPY_TYPES
from lite_runner.weights.quantization.quantized import (
    VALUES_AT_ONCE,
    QuantizedTensor,
    check_columns,
    quantize_rows,
)

PIECE_BYTES = 1 << 24  # bytes of float32 read at a time, where slices of a tensor are cheap
_SHORT: dict[sections.DType, DType] = {"float16": "F16", "bfloat16": "BF16"}

# Matrices that the native operators fuse: role -> name of the fused matrix.
TOGETHER: dict[Role | None, str] = {
    **dict.fromkeys(("query", "key", "value"), "inward"),
    **dict.fromkeys(("gate", "up"), "wide"),
    **dict.fromkeys(("expert_gate", "expert_up"), "wide"),
    **dict.fromkeys(("shared_gate", "shared_up"), "shared wide"),
    **dict.fromkeys(("recurrent_in", "recurrent_gate"), "recurrent inward"),
    "expert_down": "down",
}


def with_quantization(
    tensors: Mapping[str, LazyTensor], config: Decoder, quantization: Quantization
) -> dict[str, LazyTensor]:
    """All tensors of a model, with quantized matrices if requested.

    A file's quantized weights are used as they are if bits and groups match; other matrices are
    quantized when they are read. Without quantization all are floats, and a file's quantized form
    stays available; where blocks are kept they stay beside the floats. The floats of a
    quantized matrix are its dequantized weights. Raises ArtifactError if a group does not divide a
    matrix.
    """
    wanted = schemes(config, quantization)
    if not wanted:
        keeps_blocks = quantization.keeps_blocks
        stored = {name: _as_stored(tensor, keeps_blocks) for name, tensor in tensors.items()}
        return _alike(stored, config) if keeps_blocks else stored
    transposed = {one.name for one in parameters(config) if one.transposed}
    return {
        name: _quantized(name, tensor, wanted[name], name in transposed)
        if name in wanted
        else replace(tensor, integers=None, blocks=None)
        for name, tensor in tensors.items()
    }


def _as_stored(tensor: LazyTensor, keeps_blocks: bool) -> LazyTensor:
    """Floats, with the blocks of a matrix that keeps them, or else the integers that a file has of
    it if these can be had."""
    if _is_foreign(tensor):
        return tensor if keeps_blocks else replace(tensor, integers=None)
    if keeps_blocks and tensor.blocks:
        return replace(tensor, integers=None)
    integers = tensor.integers and replace(tensor.integers, optional=True)
    return replace(tensor, integers=integers, blocks=None)


def _alike(tensors: dict[str, LazyTensor], config: Decoder) -> dict[str, LazyTensor]:
    """The tensors, floats for matrices of another tool's layout that are multiplied as one with
    matrices of another."""
    together: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for one in parameters(config):
        if one.role in TOGETHER and one.kind == "weight":
            together[TOGETHER[one.role], one.layer].append(one.name)
    for names in together.values():
        if len({_foreign_scheme(tensors[name]) for name in names}) > 1:
            for name in names:
                if _is_foreign(tensors[name]):
                    tensors[name] = replace(tensors[name], integers=None)
    return tensors


def _foreign_scheme(tensor: LazyTensor) -> Scheme | None:
    return tensor.integers.scheme if tensor.integers and _is_foreign(tensor) else None


def _is_foreign(tensor: LazyTensor) -> bool:
    """True if the integers have another tool's layout."""
    return tensor.integers is not None and tensor.integers.scheme.group_bytes > 0


def block_types(tensors: Iterable[LazyTensor]) -> list[str]:
    """The types of GGUF's blocks, and the layouts of other tools, that matrices are computed with
    as they are."""
    kept = filter(_kept, tensors)
    return sorted({one.blocks.type_name if one.blocks else one.block_type for one in kept})


def _kept(tensor: LazyTensor) -> bool:
    return tensor.blocks is not None or _is_foreign(tensor)


def describe_blocks(tensors: Collection[LazyTensor]) -> str:
    """A line about `block_types`, and about the matrices that are wider here than in the file; ""
    where there are neither."""
    kept = [one for one in tensors if _kept(one) and not (one.integers and one.integers.file_bits)]
    parts = [f"{', '.join(block_types(kept))} as the file has them"] if kept else []
    quantized = [one for one in tensors if one.block_type and one not in kept]
    for target in ("4 bits", "float32"):
        wide = [one for one in quantized if (target == "4 bits") == _kept(one)]
        types = ", ".join(sorted({one.block_type for one in wide}))
        size = sum(_held_bytes(one) for one in wide) / 1e6
        if wide:
            parts += [f"{len(wide)} matrices of {types} widened to {target}, {size:,.1f} MB"]
    return f"weights: {'; '.join(parts)}" if parts else ""


def _held_bytes(tensor: LazyTensor) -> int:
    return tensor.integers.scheme.nbytes(*tensor.shape) if tensor.integers else tensor.nbytes


def describe(tensors: Mapping[str, LazyTensor], quantization: Quantization) -> str:
    """A line about the source of the quantized weights, with a warning if a quantized file's are
    requantized to 4 bits; `tensors` are of `with_quantization`."""
    found = [tensor.integers for tensor in tensors.values() if tensor.integers is not None]
    taken = sum(one.stored for one in found)
    rounded = len(found) - taken
    parts = [f"{taken} matrices as the checkpoint holds them"] if taken else []
    parts += [f"{rounded} matrices rounded as they are read"] if rounded else []
    if not found:  # a rank's shard of a layer
        parts = ["every matrix falls back to dequantized weights"]
    line = f"quant={quantization}: {', '.join(parts)}"
    again = [
        one.block_type
        for one in found
        if one.scheme.bits == 4 and one.block_type and not one.stored
    ]
    if again:
        line += (
            f"; {len(again)} of them are {' and '.join(sorted(set(again)))} in the file, and lose "
            "accuracy by being rounded to 4 bits again (a file in Q4_K went from a perplexity of "
            "35.43 to 37.36) -> quant=a16w8 keeps nearly all of it, quant=null all"
        )
    return line


def _quantized(name: str, tensor: LazyTensor, scheme: Scheme, transposed: bool) -> LazyTensor:
    integers = tensor.integers
    if integers is None or not _fits(integers.scheme, scheme):
        columns = tensor.shape[0] if transposed else tensor.shape[1]
        check_columns(columns, scheme, name)
        read = partial(_rounded, name, tensor, scheme, transposed)
        integers = LazyIntegers(scheme, read, False, block_type=tensor.block_type)
    return LazyTensor(
        tensor.shape, "F32", partial(dequantized, integers, transposed), integers=integers
    )


def dequantized(integers: LazyIntegers, transposed: bool) -> NDArray[np.float32]:
    """Dequantized weights of a matrix [out, in], C-contiguous; `transposed`: [in, out]."""
    values = integers.read().float32()
    return np.ascontiguousarray(values.T) if transposed else values


def _fits(stored: Scheme, wanted: Scheme) -> bool:
    """True if quantized weights can be used as they are: 8 bits in any groups, 4 bits in the
    requested ones."""
    return stored == wanted or (stored.bits == wanted.bits == 8 and not stored.group_bytes)


def _rounded(name: str, tensor: LazyTensor, scheme: Scheme, transposed: bool) -> QuantizedTensor:
    rows, columns = tensor.shape[::-1] if transposed else tensor.shape
    return quantize_rows(_pieces(tensor, rows, columns, transposed), (rows, columns), scheme, name)


def _pieces(
    tensor: LazyTensor, rows: int, columns: int, transposed: bool
) -> Iterator[NDArray[np.float32]]:
    """The matrix [rows, columns] in chunks of rows, if slices are cheap."""
    if tensor.part is None:
        whole = tensor.float32()
        yield whole.T if transposed else whole
        return
    step = max(1, PIECE_BYTES // (4 * max(columns, 1)))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        index = (slice(None), part) if transposed else (part, slice(None))
        stored = tensor.part(index)
        values = widened(stored)
        yield np.ascontiguousarray(values.T) if transposed else values
        drop_pages(stored)


def with_matrices_in(
    tensors: Mapping[str, LazyTensor], dtype: sections.DType
) -> dict[str, LazyTensor]:
    """The tensors, matrices that are wider than `dtype` rounded to it when they are read.

    Those that are saved in 16 bits already, of either type, are as they are; so are norms, biases
    and blocks beside the floats. Reading raises ArtifactError for a value that the type cannot
    hold.
    """
    short = _SHORT.get(dtype)
    if short is None:
        return dict(tensors)
    return {
        name: _rounded_to(name, tensor, short)
        if tensor.dtype == "F32" and len(tensor.shape) > 1
        else tensor
        for name, tensor in tensors.items()
    }


def describe_dtype(dtype: sections.DType, *, quantized: bool, blocks: bool = False) -> str:
    """A line about compute_dtype= where a run does not compute with matrices of that type."""
    if blocks:
        return (
            f"compute_dtype={dtype}: the file's blocks stay as they are; quant=none rounds them too"
        )
    if quantized:
        return f"compute_dtype={dtype}: quantized weights stay as they are, all else is float32"
    return (
        f"compute_dtype={dtype}: MindSpore's operators compute in float32 on a CPU, with weights "
        f"rounded to {dtype}"
    )


def _rounded_to(name: str, tensor: LazyTensor, dtype: DType) -> LazyTensor:
    part = tensor.part
    return LazyTensor(
        tensor.shape,
        dtype,
        lambda: _nearest(name, dtype, tensor.shape, tensor.chunks(PIECE_BYTES)),
        None if part is None else lambda index: _piece(name, dtype, part(index)),
        integers=tensor.integers if _is_foreign(tensor) else None,
        block_type=tensor.block_type,
        blocks=tensor.blocks,
    )


def _piece(name: str, dtype: DType, values: NDArray[np.float32]) -> NDArray[Any]:
    return _nearest(name, dtype, values.shape, [values])


def _nearest(
    name: str, dtype: DType, shape: tuple[int, ...], pieces: Iterable[NDArray[np.float32]]
) -> NDArray[Any]:
    """The stored bits [*shape] of the values that come in `pieces`."""
    result = np.empty(math.prod(shape), NUMPY_TYPES[dtype])
    limit, done = LIMITS[dtype], 0
    for piece in pieces:
        flat = piece.reshape(-1)
        for start in range(0, flat.size, VALUES_AT_ONCE):
            values = flat[start : start + VALUES_AT_ONCE]
            if not (values.max() < limit and values.min() > -limit):  # NaN fails too
                raise ArtifactError(
                    f"{name}: a value that is not a number, or too large for {dtype}",
                    "model.model_config.compute_dtype=float32, or another checkpoint",
                )
            result[done : done + values.size] = narrowed(values, dtype)
            done += values.size
        drop_pages(piece)
    return result.reshape(shape)
