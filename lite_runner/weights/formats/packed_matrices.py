"""Quantized matrices as other tools store them, unpacked when they are read.

A matrix [out, in] is made of several tensors of a module: codes, a scale for each group of inputs,
and maybe zero points: value = scale * (code - zero). Packed codes are in words of 32 bits, from the
lowest bits on.

GPTQ             qweight [in * bits / 32, out], scales [groups, out],
                 qzeros [groups, out * bits / 32] (1 less each, unless
                 checkpoint_format is gptq_v2), g_idx [in]: an input's group
AWQ              qweight [in, out / 8], scales [groups, out], qzeros [groups, out / 8]; of a word's
                 eight outputs those at even places come first
pack-quantized   weight_packed [out, in * bits / 32], weight_scale [out, groups], weight_zero_point
                 [out * bits / 32, groups], weight_g_idx; signed, and stored 2^(bits - 1) larger
int-quantized    weight I8 [out, in], weight_scale [out, groups], weight_zero_point [out, groups]
float-quantized  weight F8_E4M3 [out, in], weight_scale: one, one a row, or one a group of a row
mxfp4-pack-quantized
                 weight_packed U8 [out, in / 2], floats of 4 bits, and weight_scale U8
                 [out, in / 32], exponents of 2
fp8              as float-quantized; weight_scale_inv, one for each block of a matrix, is not
                 inverted either
MXFP4 of gpt-oss experts.gate_up_proj_blocks U8 [experts, out, in / 32, 16] and ..._scales U8
                 [experts, out, in / 32]: of each expert as above; rows of gate and up by turns
bitsandbytes     weight I8 [out, in], SCB [out]: the scales times 127; or of 4 bits weight U8
                 [out * in / 2, 1], indices into quant_map [16], the first of two in the upper bits,
                 and absmax: scales of blocks, or indices of such into nested_quant_map, to be
                 multiplied by nested_absmax and added to an offset
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.errors import ArtifactError
from lite_runner.system.files import parse_json
from lite_runner.weights import LazyTensor, widened
from lite_runner.weights.formats.ascend import unpack_ascend
from lite_runner.weights.formats.packed_layouts import (
    ASCEND_TOOLS,
    FLOATS,
    MXFP4_BLOCKS,
    PackedLayout,
    layout_in,
    layout_of_names,
    tensor_type_error,
)
from lite_runner.weights.formats.packed_matrix import (
    ModuleParts,
    PackedMatrix,
    Tensor,
    array_of,
    bytes_of,
)
from lite_runner.weights.quantization.quantized import (
    E2M1,
    VALUES_AT_ONCE,
    packed,
    powers_of_two,
    unpacked,
)

if TYPE_CHECKING:
    from lite_runner.weights.formats.safetensors_file import StoredTensor

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position in a word of each of eight outputs
_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_SUFFIXES = {
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros"),
    "compressed-tensors": (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        "weight_shape",
    ),
    "fp8": ("weight", "weight_scale", "weight_scale_inv"),
    "bitsandbytes": (
        *("weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map"),
        *("weight.nested_absmax", "weight.nested_quant_map", *_STATES),
    ),
}
# Of activations and the KV cache, which stay floats here.
_OF_INPUTS = re.compile(
    r"\.(input_scale|input_scale_ub|input_zero_point|output_scale|activation_scale|[qkv]_scale)$"
)


def unpack(
    floats: Mapping[str, LazyTensor], others: Mapping[str, StoredTensor], path: Path
) -> dict[str, LazyTensor]:
    """The tensors of a checkpoint, of which `others` are not floats: each quantized matrix as a
    tensor NAME.weight [out, in], with its integers. Only shapes and types are looked at.

    `path`: of the weights or their index. Raises ArtifactError for a layout that is not read, and
    for parts of one that are missing, or of another shape or type.
    """
    if not others:
        return dict(floats)
    every: dict[str, Tensor] = {**floats, **others}
    layout = layout_in(path.parent) or _told_by(every, path)
    if layout.method in ASCEND_TOOLS:
        return unpack_ascend(floats, others, path, layout)
    if layout.method == "mxfp4":
        floats, others = _with_experts(floats, others, layout, path)
        every = {**floats, **others}
    suffixes = _SUFFIXES.get(layout.method, ())
    modules: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in every.items():
        module, _, suffix = name.removesuffix(".weight").partition(".weight.")
        if suffix:
            suffix = f"weight.{suffix}"
        else:
            module, _, suffix = name.rpartition(".")
        if suffix in suffixes:
            modules[module][suffix] = tensor
    found: dict[str, LazyTensor] = {}
    for module, parts in modules.items():
        name = f"{module}.weight"
        if parts.keys() != {"weight"} or name in others:
            found[name] = _Module(f"{path}: {module}", parts, layout).tensor()
            for suffix in parts:
                del every[f"{module}.{suffix}"]
    of_inputs = [name for name in every if _OF_INPUTS.search(name)]
    if of_inputs:
        progress.note(
            f"{path}: {len(of_inputs)} scales of inputs or of the KV cache are left out: both are"
            " floats here"
        )
    for name in of_inputs:
        del every[name]
    for name in every:
        if name in others:
            raise tensor_type_error(path, name, others[name].dtype, ())
        found[name] = floats[name]
    return found


def _with_experts(
    floats: Mapping[str, LazyTensor],
    others: Mapping[str, StoredTensor],
    layout: PackedLayout,
    path: Path,
) -> tuple[dict[str, LazyTensor], dict[str, StoredTensor]]:
    """The tensors of a gpt-oss with a matrix for each expert in place of the stacked ones."""
    found, rest = dict(floats), dict(others)
    for name in [one for one in others if re.search(f"{MXFP4_BLOCKS}$", one)]:
        module = name.removesuffix("_blocks")
        ends = [end for end in ("blocks", "scales") if f"{module}_{end}" in rest]
        parts: dict[str, Tensor] = {end: rest.pop(f"{module}_{end}") for end in ends}
        blocks, scales = _Module(f"{path}: {module}", parts, layout).of_experts()
        experts, _, kind = module.rpartition(".")
        projections = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, (first, projection) in product(range(blocks.shape[0]), enumerate(projections)):
            place, rows = f"{experts}.{expert}.{projection}.weight", (first, len(projections))
            matrix = _of_expert(f"{path}: {place}", blocks, scales, expert, rows)
            found[place] = matrix.tensor(layout)
    return found, rest


def _of_expert(
    where: str, blocks: Tensor, scales: Tensor, expert: int, rows: tuple[int, int]
) -> PackedMatrix:
    """The rows of an expert: `rows` is the first one and the step."""
    part = (expert, slice(rows[0], None, rows[1]))
    count = blocks.shape[1] // rows[1]
    return PackedMatrix(
        *(where, (count, 32 * blocks.shape[2]), 4, 32),
        lambda order: array_of(blocks)[part].reshape(count, -1),
        lambda: powers_of_two(array_of(scales)[part]),
        table=lambda: E2M1,
    )


def _told_by(every: Mapping[str, Tensor], path: Path) -> PackedLayout:
    """The layout inferred from names and shapes of tensors, where no file has it. Raises
    ArtifactError."""
    name = layout_of_names(every)
    if name == "Golden Stick":
        return PackedLayout(name, name)
    if name in ("compressed-tensors", "FP8", "MXFP4"):
        return PackedLayout(name.lower(), name)
    if name == "bitsandbytes":
        bits = 8 if any(one.endswith(".SCB") for one in every) else 4
        return PackedLayout(name, f"bitsandbytes ({bits} bits)")
    if name == "GPTQ or AWQ":
        one = next(one for one in every if one.endswith(".qweight"))
        codes, scales = every[one], every.get(one.replace(".qweight", ".scales"))
        if scales is not None and scales.shape[-1:] == (8 * codes.shape[-1],):
            return PackedLayout("awq", "AWQ (4 bits)", 4)
    if name.startswith("GPTQ"):
        raise ArtifactError(
            f"{path}: the tensors of GPTQ, and no file says their bits, their groups, and which of"
            " two ways zero points are stored",
            "put the model's quantize_config.json, or its config.json, beside the weights",
        )
    one = next(one for one, tensor in every.items() if tensor.dtype not in FLOATS)
    raise tensor_type_error(path, one, every[one].dtype, every)


class _Module(ModuleParts):
    """The tensors of a quantized module."""

    def tensor(self) -> LazyTensor:
        """The matrix [out, in]. Raises ArtifactError where the tensors do not fit the layout."""
        if self._layout.method == "gptq":
            matrix = self._gptq()
        elif self._layout.method == "awq":
            matrix = self._awq()
        elif any(name.startswith("weight.") for name in self._parts):
            matrix = self._blocks()
        elif "weight_packed" in self._parts:
            matrix = self._pack_quantized()
        else:
            matrix = self._bytes()
        if unused := self._parts.keys() - self._taken:
            raise self._broken(f"also has {', '.join(sorted(unused))}")
        return matrix.tensor(self._layout)

    def _gptq(self) -> PackedMatrix:
        bits, subtracted = self._layout.bits or 0, self._layout.subtracted
        qweight = self._take("qweight", "I32")
        rows, columns = qweight.shape[1], qweight.shape[0] * 32 // bits
        if columns * bits != qweight.shape[0] * 32:
            raise self._broken(f"qweight is {list(qweight.shape)}, not of {bits} bits")
        group = self._group(columns)
        scales = self._take("scales", *FLOATS, shape=(-(-columns // group), rows))
        qzeros = self._take("qzeros", "I32", shape=(-(-columns // group), rows * bits // 32))

        def words(part: slice) -> NDArray[np.uint32]:
            return np.ascontiguousarray(array_of(qweight)[:, part].T)

        def zeros() -> NDArray[np.uint8]:
            stored = array_of(qzeros)
            if subtracted and bits != 3:  # subtracted from whole words, with the borrow
                stored = stored + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
            codes = _codes(stored, bits).T
            return (codes + np.uint8(1)) & np.uint8(7) if subtracted and bits == 3 else codes

        return PackedMatrix(
            *(self._where, (rows, columns), bits, group),
            partial(_from_words, words, (rows, columns), bits),
            lambda: array_of(scales).T,
            zeros,
            self._index("g_idx", columns),
            scale_bytes=bytes_of(scales),
        )

    def _awq(self) -> PackedMatrix:
        qweight = self._take("qweight", "I32")
        columns, rows = qweight.shape[0], 8 * qweight.shape[1]
        scales = self._take("scales", *FLOATS)
        group = self._group(columns, scales.shape[0])
        groups = -(-columns // group)
        self._take("scales", *FLOATS, shape=(groups, rows))
        qzeros = self._take("qzeros", "I32", shape=(groups, rows // 8))

        def words(part: slice) -> NDArray[np.uint32]:
            codes = _in_awq_order(array_of(qweight)[:, part.start // 8 : part.stop // 8])
            return packed(codes.T).view(np.uint32)

        return PackedMatrix(
            *(self._where, (rows, columns), 4, group),
            partial(_from_words, words, (rows, columns), 4),
            lambda: array_of(scales).T,
            lambda: _in_awq_order(array_of(qzeros)).T,
            scale_bytes=bytes_of(scales),
        )

    def _pack_quantized(self) -> PackedMatrix:
        if self._parts["weight_packed"].dtype == "U8":
            return self._mxfp4()
        codes, scales = self._take("weight_packed", "I32"), self._take("weight_scale", *FLOATS)
        rows, columns = map(int, array_of(self._take("weight_shape", "I32", "I64", shape=(2,))))
        fitting = [
            bits
            for bits in (4, 8, 2)
            if columns > 0 and codes.shape == (rows, -(-columns * bits // 32))
        ]
        if not fitting:
            why = f"weight_packed is {list(codes.shape)}, weight_shape {[rows, columns]}"
            raise self._broken(why)
        bits, group = fitting[0], self._group(columns, scales.shape[1])
        self._take("weight_scale", *FLOATS, shape=(rows, scales.shape[1]))
        zeros: Callable[[], NDArray[Any]] | None = None
        if "weight_zero_point" in self._parts or not self._layout.symmetric:
            shape = (-(-rows * bits // 32), scales.shape[1])
            points = self._take("weight_zero_point", "I32", shape=shape)
            zeros = lambda: _codes(array_of(points).T, bits)[:, :rows].T  # noqa: E731

        return PackedMatrix(
            *(self._where, (rows, columns), bits, group),
            partial(_from_words, lambda part: array_of(codes)[part], (rows, columns), bits),
            lambda: array_of(scales),
            zeros,
            self._index("weight_g_idx", columns),
            zero=0 if bits == 8 else 1 << bits - 1,
            scale_bytes=bytes_of(scales),
        )

    def _mxfp4(self) -> PackedMatrix:
        codes = self._take("weight_packed", "U8")
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        scales = self._take("weight_scale", "U8", shape=(rows, -(-columns // 32)))
        return PackedMatrix(
            *(self._where, (rows, columns), 4, 32, lambda order: array_of(codes)),
            lambda: powers_of_two(array_of(scales)),
            table=lambda: E2M1,
        )

    def of_experts(self) -> tuple[Tensor, Tensor]:
        """Blocks and scales of all experts' matrices, in gpt-oss's MXFP4."""
        blocks = self._take("blocks", "U8", dims=None)
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.shape[1] % 2:
            raise self._broken(f"blocks is {list(blocks.shape)}, not [experts, out, in / 32, 16]")
        return blocks, self._take("scales", "U8", shape=blocks.shape[:3])

    def _bytes(self) -> PackedMatrix:
        codes = self._take("weight", "I8", "F8_E4M3")
        rows, columns = codes.shape
        names = ("SCB", "weight_scale_inv", "weight_scale")
        name = next((one for one in names if one in self._parts), names[-1])
        stored = self._take(name, *FLOATS, dims=None)
        block, group = self._layout.block
        blocks = (-(-rows // block), -(-columns // group))
        if stored.shape != blocks:
            # One scale, one a row, or one for each of the groups of a row.
            shape = (*stored.shape, 1, 1)[: max(2, len(stored.shape))]
            if shape[0] not in (1, rows) or len(shape) != 2:
                raise self._broken(f"{name} is {list(stored.shape)} for a matrix {[rows, columns]}")
            block, group = rows // shape[0], self._group(columns, shape[1])
        integers, groups = codes.dtype == "I8", -(-columns // group)
        zeros: Callable[[], NDArray[Any]] | None = None
        if integers and ("weight_zero_point" in self._parts or not self._layout.symmetric):
            points = self._take("weight_zero_point", "I8", shape=stored.shape)
            zeros = lambda: array_of(points).reshape(-1, groups)  # noqa: E731

        if "weight_format" in self._parts:
            order = self._take("weight_format", "U8", dims=None)
            if math.prod(order.shape) != 1 or array_of(order).any():
                raise self._broken("weight_format is not 0, which are plain rows")

        def scales() -> NDArray[Any]:
            found = array_of(stored).reshape(-1, groups)
            return widened(found) / np.float32(127) if name == "SCB" else found

        return PackedMatrix(
            *(self._where, (rows, columns), 8, group),
            lambda order: array_of(codes) if order is None else array_of(codes)[:, order],
            scales,
            zeros,
            codes="integers" if integers else "e4m3",
            block=block,
            scale_bytes=bytes_of(stored),
        )

    def _blocks(self) -> PackedMatrix:
        """bitsandbytes' 4 bits: indices in blocks of a row; scales may be indices themselves."""
        state = next((one for one in _STATES if one in self._parts), _STATES[0])
        try:
            described = parse_json(array_of(self._take(state, "U8", dims=1)).tobytes())
            rows, columns = described["shape"]
            block, offset = described["blocksize"], described.get("nested_offset", 0.0)
            each = described.get("nested_blocksize", 1)
            fits = all(
                type(one) is int and 0 < one < 1 << 31 for one in (rows, columns, block, each)
            )
            fits = fits and isinstance(offset, float) and columns % block == 0
        except (ValueError, KeyError, TypeError, AttributeError):
            fits = False
        if not fits:
            raise self._broken(f"{state} is not a JSON object with shape, and blocksize in a row")
        codes = self._take("weight", "U8", shape=(rows * columns // 2, 1))
        count = rows * columns // block
        absmax = self._take("weight.absmax", "F32", "U8", shape=(count,))
        table = self._take("weight.quant_map", "F32", shape=(16,))
        if absmax.dtype == "U8":
            outer = self._take("weight.nested_absmax", "F32", shape=(-(-count // each),))
            entries = self._take("weight.nested_quant_map", "F32", shape=(256,))

        def scales() -> NDArray[np.float32]:
            found = array_of(absmax)
            if found.dtype == np.uint8:
                wide = array_of(outer)[np.arange(count) // each]
                found = array_of(entries)[found] * wide + np.float32(offset)
            return found.reshape(rows, -1)

        def values(order: object) -> NDArray[Any]:
            stored = array_of(codes).reshape(rows, -1)
            return stored << np.uint8(4) | stored >> np.uint8(4)

        return PackedMatrix(
            *(self._where, (rows, columns), 4, block, values, scales),
            scale_bytes=4,
            table=lambda: array_of(table),
        )

    def _group(self, columns: int, count: int | None = None) -> int:
        """Columns that share a scale: as in the layout, else from `count` groups."""
        group = self._layout.group
        if group is not None:
            return columns if group == -1 else group
        if not count or columns % count:
            raise self._broken(f"{count} scales a row for {columns} columns")
        return columns // count

    def _index(self, name: str, columns: int) -> Callable[[], NDArray[Any]] | None:
        if name not in self._parts:
            return None
        index = self._take(name, "I32", "I64", shape=(columns,))
        return lambda: array_of(index).astype(np.int64)


def _from_words(
    words: Callable[[slice], NDArray[np.uint32]],
    shape: tuple[int, int],
    bits: int,
    order: NDArray[np.int32] | None,
) -> NDArray[Any]:
    """Values as QuantizedTensor has them; `words` gives those of some rows, a multiple of 8."""
    rows, columns = shape
    wide = bits == 8
    result: NDArray[Any] = np.empty((rows, columns if wide else columns // 2), np.uint8)
    step = max(8, VALUES_AT_ONCE // columns // 8 * 8)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        stored = np.ascontiguousarray(words(part))
        if bits == 4 and order is None:
            result[part] = stored.view(np.uint8)[:, : columns // 2]
            continue
        codes = _codes(stored, bits)[:, :columns]
        codes = codes if order is None else codes[:, order]
        result[part] = codes ^ 0x80 if wide else packed(codes)
    return result.view(np.int8) if wide else result


def _codes(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Codes [n, count] in the order in which words [n, width] hold them."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return stored
    if bits == 4:
        return unpacked(stored)
    each = np.unpackbits(stored, axis=1, bitorder="little").reshape(len(stored), -1, bits)
    return np.packbits(each, axis=2, bitorder="little")[:, :, 0]


def _in_awq_order(words: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """AWQ's codes [n, 8 * width] of words [n, width]."""
    each = unpacked(np.ascontiguousarray(words).view(np.uint8)).reshape(len(words), -1, 8)
    return each[:, :, _AWQ_ORDER].reshape(len(words), -1)
