"""MindFormers' checkpoints in the form of MindSpore Golden Stick's PTQ, written.

For what the tensors of a cell mean see ascend. Weights have 8 bits by output, or 4 bits in groups,
both around zero; the embedding, the head and norms keep 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.ckpt_file import bytes_of, write_ckpt_entries
from lite_runner.weights.formats.compressed_tensors import linear_layers, of_16_bits, rounded
from lite_runner.weights.formats.mindformers import stored_name, to_mindformers
from lite_runner.weights.formats.safetensors_file import Entry, counted, read_once
from lite_runner.weights.quantization.quantized import QuantizedTensor, check_columns, unpacked

FORMAT = "mindformers"
FILE = "golden_stick.ckpt"
_Layout = dict[str, tuple[str, tuple[int, ...]]]


def check_writable(model: Decoder, quantization: Quantization, *, calibrated: bool) -> None:
    """Raise ConfigError for a model whose layers are not cells of one matrix [out, in] each, and
    ArtifactError for groups that do not divide one."""
    for name, parts in linear_layers(model, quantization, stored_name).items():
        one, what = parts[0], ""
        if one.expert is not None:
            what = "an expert"
        elif len(parts) > 1:
            what = f"{len(parts)} matrices in one"
        elif one.transposed:
            what = "a matrix [in, out]"
        elif quantization.group and one.shape[0] % 2:
            what = f"{one.shape[0]} outputs, of which two share a byte"
        if what:
            raise ConfigError(
                f"quantize.format={FORMAT}: {name} is {what}, expected a matrix [out, in]",
                "quantize.format=folder, or a GGUF file",
            )
        if quantization.linear is not None:
            check_columns(one.shape[1], quantization.linear, one.name)


def tensors_bytes(model: Decoder, quantization: Quantization) -> int:
    layers = linear_layers(model, quantization, stored_name)
    linear = {one.name for parts in layers.values() for one in parts}
    cells = (_layout(one, quantization) for one in parameters(model) if one.name in linear)
    floats = (one.shape for one in parameters(model) if one.name not in linear)
    return sum(bytes_of(*each) for cell in cells for each in cell.values()) + sum(
        bytes_of("F16", shape) for shape in floats
    )


def write_folder(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    quantization: Quantization,
    *,
    calibrated: bool,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the weights into `folder`, matrices in the nearest integers, or those that `calibrated`
    tensors have. `advance` is called for each tensor. Raises ArtifactError and EnvironmentFault."""
    layers, scheme = linear_layers(model, quantization, stored_name), quantization.linear
    assert scheme is not None
    entries: list[Entry] = []
    for name, tensor in to_mindformers(tensors, model).items():
        if name in layers:
            one = layers[name][0]
            own = tensors[one.name].integers if calibrated else None
            read = own.read if own else partial(rounded, name, tensor, scheme)
            cell = name.removesuffix("weight")
            layout = {f"{cell}{end}": each for end, each in _layout(one, quantization).items()}
            stored = read_once(layout, partial(_arrays, read, cell, quantization))
        else:
            cell, _, part = name.rpartition(".")
            if part == "bias" and f"{cell}.weight" in layers:
                name = f"{cell}._layer.bias"
            stored = iter([of_16_bits(name, tensor)])
        entries += counted(stored, partial(advance, 1))
    write_ckpt_entries(folder / FILE, entries)


def _layout(one: Parameter, quantization: Quantization) -> _Layout:
    """Type and shape of a cell's tensors, by the suffix of their names."""
    (rows, columns), group = one.shape, quantization.group
    shape = (rows, columns) if not group else (columns, rows // 2)
    scales = (rows,) if group in (0, columns) else (columns // group, rows)
    found: _Layout = {"_layer.weight": ("I4" if group else "I8", shape)}
    found["_layer.matmul.weight_scale"] = ("F32", scales)
    if quantization.quant != "a8w8":
        found["_layer.matmul.weight_zp"] = ("F32", scales)
    return found


def _arrays(
    read: Callable[[], QuantizedTensor], cell: str, quantization: Quantization
) -> Iterator[tuple[str, NDArray[Any]]]:
    matrix = read()
    scales = matrix.scales.astype(np.float32)
    if matrix.bits == 4:
        codes = unpacked(matrix.values.view(np.uint8)) ^ np.uint8(8)  # signed
        pairs = np.ascontiguousarray((codes[0::2] | codes[1::2] << np.uint8(4)).T)
        scales = np.ascontiguousarray(scales.T if scales.shape[1] > 1 else scales[:, 0])
        yield f"{cell}_layer.weight", pairs
    else:
        yield f"{cell}_layer.weight", matrix.values
    yield f"{cell}_layer.matmul.weight_scale", scales
    if quantization.quant != "a8w8":
        yield f"{cell}_layer.matmul.weight_zp", np.zeros_like(scales)
