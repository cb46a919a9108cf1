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
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.architectures.quantization import Scheme
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.json_file import parse_json
from lite_runner.weights.formats.packed_layouts import (
    FLOATS,
    MXFP4_BLOCKS,
    PackedLayout,
    layout_in,
    layout_of_names,
    tensor_type_error,
)
from lite_runner.weights.quantization.quantized import (
    E2M1,
    VALUES_AT_ONCE,
    Codes,
    QuantizedTensor,
    packed,
    powers_of_two,
    unpacked,
)
from lite_runner.weights.tensor import LazyIntegers, LazyTensor, widened

if TYPE_CHECKING:
    from lite_runner.weights.formats.safetensors_file import StoredTensor

Tensor: TypeAlias = "StoredTensor | LazyTensor"
MOST_GROUP, GROUP_STEP = 256, 8  # columns of a group that the native kernels take
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight outputs
_TYPES = {"I32": np.uint32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": np.uint8, "I64": np.int64}
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
    """The tensors of a checkpoint, of which `others` are no floats: each quantized matrix as a
    tensor NAME.weight [out, in], with its integers. Only shapes and types are looked at.

    `path`: of the weights or their index. Raises ArtifactError for a layout that is not read, and
    for parts of one that are missing, or of another shape or type.
    """
    if not others:
        return dict(floats)
    every: dict[str, Tensor] = {**floats, **others}
    layout = layout_in(path.parent) or _told_by(every, path)
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
    """The tensors of a gpt-oss with the matrices of each expert in place of those of all."""
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
) -> _Matrix:
    """The rows of an expert from the first on, in steps."""
    part = (expert, slice(rows[0], None, rows[1]))
    count = blocks.shape[1] // rows[1]
    return _Matrix(
        *(where, (count, 32 * blocks.shape[2]), 4, 32),
        lambda order: _array(blocks)[part].reshape(count, -1),
        lambda: powers_of_two(_array(scales)[part]),
        table=lambda: E2M1,
    )


def _told_by(every: Mapping[str, Tensor], path: Path) -> PackedLayout:
    """The layout that names and shapes of tensors tell, where no file does. Raises
    ArtifactError."""
    name = layout_of_names(every)
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


class _Module:
    """The tensors of a quantized module."""

    def __init__(self, where: str, parts: Mapping[str, Tensor], layout: PackedLayout) -> None:
        self._where, self._parts, self._layout = where, parts, layout
        self._taken: set[str] = set()

    def tensor(self) -> LazyTensor:
        """Their matrix [out, in]. Raises ArtifactError where they are not those of the layout."""
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

    def _gptq(self) -> _Matrix:
        bits, subtracted = self._layout.bits or 0, self._layout.subtracted
        qweight = self._take("qweight", "I32")
        rows, columns = qweight.shape[1], qweight.shape[0] * 32 // bits
        if columns * bits != qweight.shape[0] * 32:
            raise self._broken(f"qweight is {list(qweight.shape)}, not of {bits} bits")
        group = self._group(columns)
        scales = self._take("scales", *FLOATS, shape=(-(-columns // group), rows))
        qzeros = self._take("qzeros", "I32", shape=(-(-columns // group), rows * bits // 32))

        def words(part: slice) -> NDArray[np.uint32]:
            return np.ascontiguousarray(_array(qweight)[:, part].T)

        def zeros() -> NDArray[np.uint8]:
            stored = _array(qzeros)
            if subtracted and bits != 3:  # from whole words: what was borrowed is carried
                stored = stored + np.uint32(0xFFFFFFFF // ((1 << bits) - 1))
            codes = _codes(stored, bits).T
            return (codes + np.uint8(1)) & np.uint8(7) if subtracted and bits == 3 else codes

        return _Matrix(
            *(self._where, (rows, columns), bits, group),
            partial(_from_words, words, (rows, columns), bits),
            lambda: _array(scales).T,
            zeros,
            self._index("g_idx", columns),
            scale_bytes=_bytes_of(scales),
        )

    def _awq(self) -> _Matrix:
        qweight = self._take("qweight", "I32")
        columns, rows = qweight.shape[0], 8 * qweight.shape[1]
        scales = self._take("scales", *FLOATS)
        group = self._group(columns, scales.shape[0])
        groups = -(-columns // group)
        self._take("scales", *FLOATS, shape=(groups, rows))
        qzeros = self._take("qzeros", "I32", shape=(groups, rows // 8))

        def words(part: slice) -> NDArray[np.uint32]:
            codes = _in_awq_order(_array(qweight)[:, part.start // 8 : part.stop // 8])
            return packed(codes.T).view(np.uint32)

        return _Matrix(
            *(self._where, (rows, columns), 4, group),
            partial(_from_words, words, (rows, columns), 4),
            lambda: _array(scales).T,
            lambda: _in_awq_order(_array(qzeros)).T,
            scale_bytes=_bytes_of(scales),
        )

    def _pack_quantized(self) -> _Matrix:
        if self._parts["weight_packed"].dtype == "U8":
            return self._mxfp4()
        codes, scales = self._take("weight_packed", "I32"), self._take("weight_scale", *FLOATS)
        rows, columns = map(int, _array(self._take("weight_shape", "I32", "I64", shape=(2,))))
        fitting = [
            bits
            for bits in (4, 8, 2)
            if columns > 0 and codes.shape == (rows, -(-columns * bits // 32))
        ]
        if not fitting:
            told = f"weight_packed is {list(codes.shape)}, weight_shape {[rows, columns]}"
            raise self._broken(told)
        bits, group = fitting[0], self._group(columns, scales.shape[1])
        self._take("weight_scale", *FLOATS, shape=(rows, scales.shape[1]))
        zeros: Callable[[], NDArray[Any]] | None = None
        if "weight_zero_point" in self._parts or not self._layout.symmetric:
            shape = (-(-rows * bits // 32), scales.shape[1])
            points = self._take("weight_zero_point", "I32", shape=shape)
            zeros = lambda: _codes(_array(points).T, bits)[:, :rows].T  # noqa: E731

        return _Matrix(
            *(self._where, (rows, columns), bits, group),
            partial(_from_words, lambda part: _array(codes)[part], (rows, columns), bits),
            lambda: _array(scales),
            zeros,
            self._index("weight_g_idx", columns),
            zero=0 if bits == 8 else 1 << bits - 1,
            scale_bytes=_bytes_of(scales),
        )

    def _mxfp4(self) -> _Matrix:
        codes = self._take("weight_packed", "U8")
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        scales = self._take("weight_scale", "U8", shape=(rows, -(-columns // 32)))
        return _Matrix(
            *(self._where, (rows, columns), 4, 32, lambda order: _array(codes)),
            lambda: powers_of_two(_array(scales)),
            table=lambda: E2M1,
        )

    def of_experts(self) -> tuple[Tensor, Tensor]:
        """Blocks and scales of the matrices of all experts, in gpt-oss's MXFP4."""
        blocks = self._take("blocks", "U8", dims=None)
        if len(blocks.shape) != 4 or blocks.shape[3] != 16 or blocks.shape[1] % 2:
            raise self._broken(f"blocks is {list(blocks.shape)}, not [experts, out, in / 32, 16]")
        return blocks, self._take("scales", "U8", shape=blocks.shape[:3])

    def _bytes(self) -> _Matrix:
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
            zeros = lambda: _array(points).reshape(-1, groups)  # noqa: E731

        if "weight_format" in self._parts:
            order = self._take("weight_format", "U8", dims=None)
            if math.prod(order.shape) != 1 or _array(order).any():
                raise self._broken("weight_format is not 0, which are plain rows")

        def scales() -> NDArray[Any]:
            found = _array(stored).reshape(-1, groups)
            return widened(found) / np.float32(127) if name == "SCB" else found

        return _Matrix(
            *(self._where, (rows, columns), 8, group),
            lambda order: _array(codes) if order is None else _array(codes)[:, order],
            scales,
            zeros,
            codes="integers" if integers else "e4m3",
            block=block,
            scale_bytes=_bytes_of(stored),
        )

    def _blocks(self) -> _Matrix:
        """bitsandbytes' 4 bits: indices in blocks of a row; scales may be indices themselves."""
        state = next((one for one in _STATES if one in self._parts), _STATES[0])
        try:
            described = parse_json(_array(self._take(state, "U8", dims=1)).tobytes())
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
            found = _array(absmax)
            if found.dtype == np.uint8:
                wide = _array(outer)[np.arange(count) // each]
                found = _array(entries)[found] * wide + np.float32(offset)
            return found.reshape(rows, -1)

        def values(order: object) -> NDArray[Any]:
            stored = _array(codes).reshape(rows, -1)
            return stored << np.uint8(4) | stored >> np.uint8(4)

        return _Matrix(
            *(self._where, (rows, columns), 4, block, values, scales),
            scale_bytes=4,
            table=lambda: _array(table),
        )

    def _take(
        self,
        name: str,
        *types: str,
        shape: tuple[int, ...] | None = None,
        dims: int | None = 2,
    ) -> Tensor:
        """The tensor NAME, of one of these types, and of a shape or number of dimensions."""
        found = self._parts.get(name)
        if found is None:
            raise self._broken(f"lacks {name}")
        self._taken.add(name)
        if found.dtype not in types:
            raise self._broken(f"{name} is {found.dtype}, expected {' or '.join(types)}")
        if shape is not None and found.shape != shape:
            raise self._broken(f"{name} is {list(found.shape)}, expected {list(shape)}")
        if (shape is None and dims is not None and len(found.shape) != dims) or 0 in found.shape:
            raise self._broken(f"{name} is {list(found.shape)}, expected a matrix")
        return found

    def _group(self, columns: int, count: int | None = None) -> int:
        """Columns that share a scale: as the layout says, else of `count` groups."""
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
        return lambda: _array(index).astype(np.int64)

    def _broken(self, what: str) -> ArtifactError:
        return _broken(self._where, self._layout.name, what)


@dataclass(frozen=True)
class _Matrix:
    """A matrix [out, in]; what it is made of is read on demand."""

    where: str
    shape: tuple[int, int]
    bits: int  # in the file
    group: int  # columns that share a scale
    # Columns in this order, or as they are (None), as QuantizedTensor has them.
    values: Callable[[NDArray[Any] | None], NDArray[Any]]
    scales: Callable[[], NDArray[Any]]  # [rows / block, groups]
    zeros: Callable[[], NDArray[Any]] | None = None  # alike; None: the middle of all codes
    index: Callable[[], NDArray[np.int64]] | None = None  # the group of each column
    codes: Codes = "integers"
    zero: int = 0  # where there are no zeros
    block: int = 1  # rows that share a scale
    scale_bytes: int = 2
    table: Callable[[], NDArray[np.float32]] | None = None  # of what codes of 4 bits stand for

    def tensor(self, layout: PackedLayout) -> LazyTensor:
        """As a tensor, with its integers where the kernels take groups of that size."""
        (_, columns), wide = self.shape, self.bits == 8
        if not wide and columns % GROUP_STEP:
            raise _broken(self.where, layout.name, f"has {columns} columns, not a multiple of 8")
        whole = self.group >= columns and self.zeros is None and self.table is None
        unit = 0 if whole else _unit(math.gcd(self.group, columns))
        read, integers = partial(self._read, layout, unit), None
        if columns % GROUP_STEP == 0 and unit % GROUP_STEP == 0:
            of_group = 4 if whole else self.scale_bytes + (self.zeros is not None)
            scheme = Scheme(8 if wide else 4, unit, of_group)
            integers = LazyIntegers(
                scheme,
                read,
                stored=True,
                ordered=self.index is not None and layout.ordered,
                file_bits=self.bits if self.bits < 4 else 0,
            )
        return LazyTensor(
            self.shape,
            "F32",
            lambda: read().float32(),
            integers=integers,
            block_type=layout.name,
        )

    def _read(self, layout: PackedLayout, unit: int) -> QuantizedTensor:
        rows, columns = self.shape
        order = None if self.index is None else self._order(layout, self.index())
        values, scales = self.values(order), self.scales()
        if self.codes == "e4m3" and (values & 0x7F == 0x7F).any():
            raise _broken(self.where, layout.name, "has a weight that is no number")
        table = None if self.table is None else self.table()
        if not all(np.isfinite(widened(one)).all() for one in (scales, table) if one is not None):
            raise _broken(self.where, layout.name, "has a scale that is not finite")
        places = np.arange(0, columns, unit or columns) // self.group
        lines = np.arange(rows) // self.block

        def of_groups(array: NDArray[Any]) -> NDArray[Any]:
            return np.ascontiguousarray(array[lines][:, places])

        scales, zeros = of_groups(scales), None
        if self.zeros is not None:
            zeros = of_groups(self.zeros())
            if zeros.dtype == np.uint8 and self.bits == 8:
                zeros ^= 0x80
            zeros = zeros.view(np.int8)
        return QuantizedTensor(
            bits=8 if self.bits == 8 else 4,
            group=unit,
            values=values,
            scales=scales if unit else np.ascontiguousarray(widened(scales)[:, 0]),
            minimums=None,
            zero=self.zero,
            zeros=zeros,
            order=order,
            codes=self.codes,
            table=table,
        )

    def _order(self, layout: PackedLayout, index: NDArray[np.int64]) -> NDArray[np.int32] | None:
        """The inputs in an order in which those of a group lie together; None: they do."""
        order = np.argsort(index, kind="stable").astype(np.int32)
        groups = np.arange(len(index)) // self.group
        if not np.array_equal(index[order], groups):
            told = f"g_idx has not {self.group} inputs of each group"
            raise _broken(self.where, layout.name, told)
        if np.array_equal(index, groups):
            return None
        if not layout.ordered:
            raise _broken(self.where, layout.name, "g_idx mixes groups, but desc_act is false")
        return order


def _unit(group: int) -> int:
    """The most columns, of those that divide a group, that the kernels take."""
    fitting = [size for size in range(1, min(group, MOST_GROUP) + 1) if group % size == 0]
    return max([size for size in fitting if size % GROUP_STEP == 0] or fitting)


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
    """Codes [n, count] in the order in which they lie in words [n, width]."""
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


def _array(tensor: Tensor) -> NDArray[Any]:
    """The stored values; the bits of bfloat16 and of floats of 8 bits."""
    if isinstance(tensor, LazyTensor):
        return tensor.read()
    stored = tensor.data.view(_TYPES[tensor.dtype]).reshape(tensor.shape)
    return np.require(stored, requirements="A")


def _bytes_of(scales: Tensor) -> int:
    return 4 if scales.dtype == "F32" else 2


def _broken(where: str, name: str, what: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: not a matrix of {name}: {what}",
        "fetch the folder again, its config.json and weights of one revision",
    )
