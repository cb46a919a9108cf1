"""Quantized checkpoints of Ascend's tools: msModelSlim, and MindSpore Golden Stick.

A matrix is weight [out, in] with a weight_scale for each output, or each group of an output's
inputs. Names are Hugging Face's, or MindFormers' with those of Golden Stick's cells in them. The
type of each tensor is in quant_model_description.json (msModelSlim) or in Golden Stick's
quantization_description.json; a .ckpt has none.

8 bits           value = scale * (code - weight_offset); of 8-bit inputs with a fixed scale,
                 deq_scale = input_scale * scale: float32, or its bits in 64
4 bits           signed, two a byte, the first in the lower bits. msModelSlim has two outputs in
                 a byte [out / 2, in], two inputs [out, in / 2] (W4A16 by output), or one code
                 [out, in]; Golden Stick two outputs [in, out / 2], and scales [groups, out]
floats           F8_E4M3, or two of 4 bits a byte, with exponents of 2 for each 32 inputs

Golden Stick also has factors of inputs beside a matrix (smooth_scale, or an input_scale for each),
which are part of it, as a column's scale: such a matrix becomes floats.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.errors import ArtifactError
from lite_runner.weights import LazyTensor, widened
from lite_runner.weights.formats.packed_layouts import FLOATS, PackedLayout, tensor_type_error
from lite_runner.weights.formats.packed_matrix import (
    ModuleParts,
    PackedMatrix,
    Tensor,
    array_of,
    broken,
    bytes_of,
)
from lite_runner.weights.quantization.quantized import E2M1, packed, powers_of_two

# Parts of names by Golden Stick's cells, and their replacements.
_CELLS = (
    (r"\._(?:handler|layer)\.", "."),
    (r"\._weight_quantizer\.zp_neg$", ".weight_zp"),
    (r"\.(?:_weight_quantizer\.scale|matmul\.scale)$", ".weight_scale"),
    (r"\.matmul\.dequant_scale$", ".deq_scale"),
    (r"\.(?:matmul|quant_op)\.(\w+)$", r".\1"),
)
_PARTS = {"weight", "weight_scale", "weight_scale_second", "weight_offset", "weight_offset_second"}
_PARTS |= {"weight_zp", "deq_scale", "quant_bias", "scale_bias", "smooth_scale"}
_PARTS |= {"input_scale", "input_offset", "input_zp"}
# Of quantized attention and KV caches, which stay floats here.
_OF_CACHE = re.compile(
    r"\.(kv_cache_(scale|offset)|fa\d?_[qkvp]\.(scale|offset)|fa_[qkvp]_\w+|quant_type"
    r"|[kv]_(scale|zp)_(no_)?fusion|key_value_t_\w+|k_v_(scale|zp)_fusion)$"
)


def unpack_ascend(
    floats: Mapping[str, LazyTensor], others: Mapping[str, Tensor], path: Path, layout: PackedLayout
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint, each quantized matrix as a tensor NAME.weight [out, in]; names
    without those of Golden Stick's cells. Raises ArtifactError."""
    types = layout.types
    found: dict[str, LazyTensor] = {}
    modules: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    unread = 0
    for stored, tensor in {**floats, **others}.items():
        name = _plain_name(stored)
        module, _, part = name.rpartition(".")
        kind = types.get(stored, "")
        if _OF_CACHE.search(name):
            unread += 1
        elif part in _PARTS and (part != "weight" or stored in others):
            if part in modules[module]:
                raise ArtifactError(f"{path}: {stored}: the matrix {module} occurs twice")
            modules[module][part] = tensor
            if types and not kind:
                raise broken(f"{path}: {module}", layout.name, f"{stored} is not described")
        elif stored in others:
            raise tensor_type_error(path, stored, others[stored].dtype, ())
        elif part == "weight" and kind.startswith("W") and kind != "W16A16S":
            why = f"weight is described as {kind}, got {tensor.dtype}"
            raise broken(f"{path}: {module}", layout.name, why)
        elif not re.search(r"norm\.module\.\w+$", name):  # written twice
            assert isinstance(tensor, LazyTensor)
            found[name] = tensor
    for module, parts in modules.items():
        one = _Module(f"{path}: {module}", parts, layout, types.get(f"{module}.weight", ""))
        found[f"{module}.weight"] = one.tensor()
        unread += bool(parts.keys() & {"input_scale", "scale_bias"})
        if f"{module}.bias" not in found and (bias := one.bias()) is not None:
            found[f"{module}.bias"] = bias
    if unread:
        progress.note(
            f"{path}: {unread} scales of inputs or of the KV cache are left out: both are floats"
            " here"
        )
    return found


def _plain_name(name: str) -> str:
    for pattern, plain in _CELLS:
        name = re.sub(pattern, plain, name)
    return name


class _Module(ModuleParts):
    """The tensors of a quantized matrix, and its described type, if any."""

    def __init__(
        self, where: str, parts: Mapping[str, Tensor], layout: PackedLayout, kind: str
    ) -> None:
        super().__init__(where, parts, layout)
        self._kind, self._golden = kind, layout.method == "Golden Stick"
        if "weight" not in parts:
            raise self._broken("lacks weight")
        self._weight = parts["weight"]
        if len(self._weight.shape) != 2 or 0 in self._weight.shape:
            raise self._broken(f"weight is {list(self._weight.shape)}, expected a matrix")

    def tensor(self) -> LazyTensor:
        """Their matrix [out, in]."""
        dtype, stored = self._weight.dtype, self._weight.shape
        if dtype == "U8":
            return self._floats(4, (stored[0], 2 * stored[1])).tensor(self._layout)
        if dtype == "F8_E4M3":
            return self._floats(8, (stored[0], stored[1])).tensor(self._layout)
        if dtype not in ("I8", "I4"):
            raise self._broken(f"weight is {dtype}, expected I8, U8 or F8_E4M3")
        rows, columns, values = self._integers()
        four = values is not None
        scales, groups = self._scales(rows)
        if columns % groups:
            raise self._broken(f"{groups} scales a row for {columns} columns")
        zeros = self._zeros(rows, groups, 8 if four else 0)
        matrix = PackedMatrix(
            *(self._where, (rows, columns), 4 if four else 8, columns // groups),
            (lambda order: values()) if values else (lambda order: array_of(self._weight)),
            scales,
            None if zeros is None else lambda: zeros,
            zero=8 if four else 0,
            scale_bytes=4,
        )
        tensor, factors = matrix.tensor(self._layout), self._factors(columns)
        if factors is None:
            return tensor
        # A scale for each column has no place beside one for each row.
        read = tensor.read
        return LazyTensor(
            tensor.shape, "F32", lambda: read() * factors, block_type=tensor.block_type
        )

    def bias(self) -> LazyTensor | None:
        """The bias in Golden Stick's quant_bias, without the offset of the inputs; None:
        none, but for what float16 rounds away."""
        if "quant_bias" not in self._parts or not self._golden:
            return None
        rows, columns = self._weight.shape
        taken = self._take("quant_bias", "I32", shape=(rows,))
        stored = array_of(taken).view(np.int32).astype(np.int64)
        offset = next((n for n in ("input_zp", "input_offset") if n in self._parts), None)
        codes = array_of(self._weight)
        offsets = np.zeros(1) if offset is None else self._numbers(offset).astype(np.float64)
        if offsets.shape not in ((), (1,), (columns,)):
            raise self._broken(
                f"{offset} is {list(offsets.shape)}, expected [{columns}] or one number"
            )
        of_inputs = (codes.astype(np.int32) * offsets).sum(1)
        bias = stored + of_inputs
        if (np.abs(bias) <= 2 + np.abs(of_inputs) / 512).all():
            return None
        values = (bias * self._per_output("deq_scale")).astype(np.float32)
        return LazyTensor(values.shape, "F32", lambda: values)

    def _integers(self) -> tuple[int, int, Callable[[], NDArray[np.uint8]] | None]:
        """Rows, columns, and of 4 bits the codes 0 to 15, two inputs a byte."""
        first, second = self._weight.shape
        if not (self._weight.dtype == "I4" or self._kind.startswith("W4")):
            return first, second, None
        if self._golden:
            return 2 * second, first, lambda: self._two_outputs(array_of(self._weight).T)
        rows = self._take("weight_scale", *FLOATS, dims=2).shape[0]
        if 2 * first == rows:
            return rows, second, lambda: self._two_outputs(array_of(self._weight))
        by_output = self._parts["weight_scale"].shape[1] == 1
        if self._kind == "W4A16" and by_output and self._layout.paired:
            return rows, 2 * second, lambda: array_of(self._weight).view(np.uint8) ^ np.uint8(0x88)
        return first, second, self._one_a_byte

    def _two_outputs(self, stored: NDArray[Any]) -> NDArray[np.uint8]:
        """The integers of bytes [out / 2, in], which hold two outputs each."""
        pairs = stored.view(np.uint8)
        codes = np.empty((2 * pairs.shape[0], pairs.shape[1]), np.uint8)
        codes[0::2], codes[1::2] = pairs & 15, pairs >> 4
        return packed(codes ^ np.uint8(8))

    def _one_a_byte(self) -> NDArray[np.uint8]:
        stored = array_of(self._weight)
        if stored.min(initial=0) < -8 or stored.max(initial=0) > 7:
            raise self._broken("weight has numbers of more than 4 bits")
        return packed((stored.view(np.uint8) & np.uint8(15)) ^ np.uint8(8))

    def _scales(self, rows: int) -> tuple[Callable[[], NDArray[Any]], int]:
        """The scales [rows, groups], and how many there are a row."""
        if "weight_scale" not in self._parts:  # of 8-bit inputs
            factor = self._input_scale()
            whole = factor.reshape(-1)[:1] if factor.min() == factor.max() else np.ones(1)
            scales = (self._per_output("deq_scale") / whole).astype(np.float32)[:, None]
            if len(scales) != rows:
                raise self._broken(f"deq_scale has {len(scales)} numbers for {rows} outputs")
            return (lambda: scales), 1
        stored = self._take("weight_scale", *FLOATS, dims=None)
        shape = stored.shape
        turned = len(shape) == 2 and shape[0] != rows and shape[1] == rows
        groups = 1 if len(shape) == 1 else shape[0] if turned else shape[-1]
        if shape not in ((rows,), (rows, groups), (groups, rows)):
            raise self._broken(f"weight_scale is {list(shape)} for {rows} outputs")
        second = self._parts.get("weight_scale_second")
        if second is not None:
            groups = second.shape[-1]
            self._take("weight_scale_second", *FLOATS, shape=(rows, groups))

        def read() -> NDArray[np.float32]:
            found = _wide(stored)
            found = found.T if turned else found.reshape(rows, -1)
            return found if second is None else found * _wide(second)

        return read, groups

    def _zeros(self, rows: int, groups: int, middle: int) -> NDArray[np.int8] | None:
        """Zero points [rows, groups]; None: they are in the middle."""
        name = "weight_zp" if "weight_zp" in self._parts else "weight_offset"
        if name not in self._parts:
            return None
        stored = self._numbers(name)
        if stored.size not in (rows, rows * groups) or "weight_offset_second" in self._parts:
            both = stored.size == rows and "weight_offset_second" in self._parts
            if not both or stored.any() or self._numbers("weight_offset_second").any():
                raise self._broken(f"{name} is {list(self._parts[name].shape)}, or not 0")
        if not stored.any():
            return None
        stored = -stored if name == "weight_zp" else stored
        turned = stored.shape == (groups, rows) and groups != rows
        zeros = np.broadcast_to(stored.T if turned else stored.reshape(rows, -1), (rows, groups))
        zeros = zeros + middle
        if not (zeros == np.rint(zeros)).all() or np.abs(zeros).max() > 127:
            raise self._broken(f"{name} has numbers that are not zero points of 8 bits")
        return zeros.astype(np.int8)

    def _factors(self, columns: int) -> NDArray[np.float32] | None:
        factors = np.ones(1, np.float32)
        if "smooth_scale" in self._parts:
            factors = self._numbers("smooth_scale")
        elif "weight_scale" not in self._parts:
            scale = self._input_scale()
            factors = factors if scale.min() == scale.max() else 1 / scale
        if factors.size not in (1, columns) or not np.isfinite(factors).all():
            raise self._broken(f"{factors.size} scales of {columns} inputs, or no finite ones")
        return None if (factors == 1).all() else factors.reshape(-1).astype(np.float32)

    def _input_scale(self) -> NDArray[np.float32]:
        scale = _wide(self._take("input_scale", *FLOATS, dims=None))
        if not scale.all():
            raise self._broken("input_scale is 0")
        # For kernels that multiply it is stored inverted, and its offset as floats.
        inverted = "input_zp" in self._parts and self._parts["input_zp"].dtype in FLOATS
        return 1 / scale if inverted else scale

    def _numbers(self, name: str) -> NDArray[np.float32]:
        """Zero points, or factors, of any shape."""
        found = self._take(name, *FLOATS, "I8", "U8", "I32", "I64", dims=None)
        values = array_of(found)
        return widened(values.view(np.int32) if found.dtype == "I32" else values)

    def _per_output(self, name: str) -> NDArray[np.float32]:
        stored = self._take(name, "F32", "I64", "U64", dims=None)
        values = array_of(stored).reshape(-1)
        return values if stored.dtype == "F32" else values.astype(np.uint32).view(np.float32)

    def _floats(self, bits: int, shape: tuple[int, int]) -> PackedMatrix:
        rows, columns = shape
        scales = self._take("weight_scale", "U8", *FLOATS, dims=2)
        exponents, groups = scales.dtype == "U8", scales.shape[1]
        if scales.shape[0] != rows or groups not in (1, -(-columns // 32)):
            raise self._broken(f"weight_scale is {list(scales.shape)} for a matrix {list(shape)}")
        self._zeros(rows, groups, 0)
        return PackedMatrix(
            *(self._where, shape, bits, 32 if exponents else columns),
            lambda order: array_of(self._weight),
            lambda: powers_of_two(array_of(scales)) if exponents else array_of(scales),
            codes="e4m3" if bits == 8 else "integers",
            scale_bytes=bytes_of(scales),
            table=None if bits == 8 else lambda: E2M1,
        )


def _wide(tensor: Tensor) -> NDArray[np.float32]:
    return widened(array_of(tensor))
