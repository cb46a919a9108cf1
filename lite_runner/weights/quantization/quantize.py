"""Quantizes a model's matrices for a run, using a file's own quantized weights if they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import Quantization, Scheme
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.quantization.quantized import QuantizedTensor, check_columns, quantize_rows
from lite_runner.weights.tensor import LazyIntegers, LazyTensor, widened

PIECE_BYTES = 1 << 24  # of float32 that is read at a time, where slices of a tensor are cheap


def schemes(config: Decoder, quantization: Quantization) -> dict[str, Scheme]:
    """Canonical name -> scheme of the matrices that are quantized.

    These are the linear layers, the embedding and the head; norms, biases and tables of positions
    stay float32.
    """
    table = parameters(config)
    ends = {table[0].name, "lm_head.weight"}
    wanted = {
        one.name: quantization.table if one.name in ends else quantization.linear
        for one in table
        if one.name in ends or one.layout != "plain"
    }
    return {name: scheme for name, scheme in wanted.items() if scheme is not None}


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
    if quantization.keeps_blocks:
        return {name: _as_stored(tensor) for name, tensor in tensors.items()}
    if not wanted:
        return {name: replace(_with_own(tensor), own=None) for name, tensor in tensors.items()}
    transposed = {one.name for one in parameters(config) if one.layout == "in_out"}
    return {
        name: _quantized(name, tensor, wanted[name], name in transposed)
        if name in wanted
        else replace(tensor, integers=None, own=None)
        for name, tensor in tensors.items()
    }


def _with_own(tensor: LazyTensor) -> LazyTensor:
    """Floats, with the integers that a file has of them if these can be had."""
    if tensor.integers is None:
        return tensor
    return replace(tensor, integers=replace(tensor.integers, optional=True))


def _as_stored(tensor: LazyTensor) -> LazyTensor:
    """With blocks if it is a matrix that has such; integers of others are not wanted."""
    return replace(tensor, integers=None) if tensor.own else replace(_with_own(tensor), own=None)


def block_types(tensors: Mapping[str, LazyTensor]) -> list[str]:
    """The types of GGUF's blocks that matrices are computed with as they are."""
    return sorted({tensor.own.type_name for tensor in tensors.values() if tensor.own})


def describe_blocks(types: Sequence[str]) -> str:
    """A line about `block_types`."""
    return f"weights: {', '.join(types)} as the file has them"


def describe(tensors: Mapping[str, LazyTensor], quantization: Quantization) -> str:
    """A line about the source of the quantized weights, with a warning if a quantized file's are
    requantized to 4 bits; `tensors` are of `with_quantization`."""
    found = [tensor.integers.stored for tensor in tensors.values() if tensor.integers is not None]
    taken, rounded = sum(found), len(found) - sum(found)
    parts = [f"{taken} matrices as the checkpoint holds them"] if taken else []
    parts += [f"{rounded} matrices rounded as they are read"] if rounded else []
    if not found:  # a part of a layer, as ranks have it
        parts = ["every matrix falls back to dequantized weights"]
    line = f"quant={quantization}: {', '.join(parts)}"
    every = [tensor.integers for tensor in tensors.values() if tensor.integers is not None]
    again = [one.blocks for one in every if one.scheme.bits == 4 and one.blocks and not one.stored]
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
        integers = LazyIntegers(scheme, read, False, blocks=tensor.blocks)
    return LazyTensor(
        tensor.shape, "F32", partial(dequantized, integers, transposed), integers=integers
    )


def dequantized(integers: LazyIntegers, transposed: bool) -> NDArray[np.float32]:
    """Dequantized weights of a matrix [out, in], C-contiguous; `transposed`: [in, out]."""
    values = integers.read().float32()
    return np.ascontiguousarray(values.T) if transposed else values


def _fits(stored: Scheme, wanted: Scheme) -> bool:
    """Whether quantized weights can be used as they are: 8 bits in any groups, 4 bits in the
    requested ones."""
    return stored == wanted or stored.bits == wanted.bits == 8


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
