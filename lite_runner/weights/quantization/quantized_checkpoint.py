"""A quantized checkpoint: a folder with model.safetensors and quantization.json, its manifest.

A matrix NAME [out, in] is NAME (I8, or U8 with two columns a byte), NAME.scales (F32 [out], or F16
[out, groups]) and, of 4 bits, NAME.minimums (F16 [out, groups]); what each means,
weights/quantized.py says. All else is F32. Names are MindFormers', and matrices are [out, in]
where MindFormers holds [in, out] too. The model's sizes are in config.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import Quant, QuantGroup, Quantization, Scheme
from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write
from lite_runner.system.json_file import read_json_object
from lite_runner.weights.formats.safetensors_file import (
    Entry,
    StoredTensor,
    stored_tensors,
    view_tensor,
    write_entries,
)
from lite_runner.weights.layouts import check_tensors
from lite_runner.weights.quantization.quantize import dequantized, schemes
from lite_runner.weights.quantization.quantized import QuantizedTensor, check_columns
from lite_runner.weights.tensor import LazyIntegers, LazyTensor

MANIFEST, WEIGHTS = "quantization.json", "model.safetensors"
SCHEMA = 1
MAX_BYTES = 16 << 20
_HINT = "write it again (run_mode=quantize), or copy the whole folder again"


@dataclass(frozen=True)
class QuantizationManifest:
    """What quantization.json says."""

    quantization: Quantization
    source: str  # the checkpoint that was quantized
    schemes: Mapping[str, Scheme]  # of each matrix, by canonical name

    def write(self, folder: Path) -> None:
        """Write quantization.json."""
        plain = {
            "schema": SCHEMA,
            "quant": self.quantization.quant,
            "group": self.quantization.group,
            "source": self.source,
            "tensors": {
                name: {"bits": scheme.bits, "group": scheme.group}
                for name, scheme in self.schemes.items()
            },
        }
        with atomic_write(folder / MANIFEST) as file:
            file.write((json.dumps(plain, indent=1) + "\n").encode())


def read_quantization(path: Path) -> QuantizationManifest | None:
    """The manifest beside the weights at `path`, file or folder; None where there is none.

    Raises ArtifactError where it is broken.
    """
    manifest = (path if path.is_dir() else path.parent) / MANIFEST
    if not manifest.is_file() or (path.is_file() and path.name != WEIGHTS):
        return None
    what = f"the manifest of a quantized checkpoint (schema {SCHEMA})"
    raw = read_json_object(manifest, what, most=MAX_BYTES, hint=_HINT)
    try:
        return _from_plain(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{manifest}: not {what}: {error!r}", _HINT) from error


def _from_plain(raw: dict[str, Any]) -> QuantizationManifest:
    if type(raw["schema"]) is not int or raw["schema"] != SCHEMA:
        raise ValueError(f"schema {raw['schema']!r}")
    quant, group = raw["quant"], raw["group"]
    groups = get_args(QuantGroup) if quant == "a16w4" else (0,)
    known = isinstance(quant, str) and quant in get_args(Quant) and quant != "none"
    if not known or type(group) is not int or group not in groups:
        raise ValueError(f"quant {quant!r} with group {group!r}")
    quantization = Quantization(quant, group)
    if not isinstance(raw["source"], str):
        raise ValueError(f"source {raw['source']!r}")
    found = {}
    for name, entry in raw["tensors"].items():
        scheme = Scheme(entry["bits"], entry["group"])
        allowed = {quantization.linear, quantization.table}
        # Blocks of 8 bits that the source had were taken as they are.
        integers = type(scheme.bits) is type(scheme.group) is int
        if not integers or (scheme not in allowed and scheme != Scheme(8, 32)):
            raise ValueError(f"{name}: {entry!r} with quant={quantization}")
        found[name] = scheme
    return QuantizationManifest(quantization, raw["source"], found)


def open_quantized(
    file: Path, manifest: QuantizationManifest, config: Decoder
) -> dict[str, LazyTensor]:
    """Every tensor of the model by its canonical name; matrices give their integers and, as F32,
    what these stand for.

    Raises ArtifactError where the file does not hold exactly what the manifest and `config` say.
    """
    stored, table = stored_tensors(file), parameters(config)
    wanted = schemes(config, manifest.quantization)
    if manifest.schemes.keys() != wanted.keys():
        odd = sorted(manifest.schemes.keys() ^ wanted.keys())
        raise ArtifactError(
            f"{file.parent / MANIFEST}: the matrices are not those of the model: "
            f"{', '.join(odd[:5])}",
            "check that model= and load_checkpoint= belong together, or use model=auto",
        )
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in table:
        scheme = manifest.schemes.get(one.name)
        if scheme is not None:
            check_columns(_out_in(one)[1], scheme, f"{file}: tensor {one.name}")
        layout |= _layout(one, scheme)
    shapes = {name: shape for name, (_, shape) in layout.items()}
    check_tensors({name: one.shape for name, one in stored.items()}, shapes, str(file))
    for name, (dtype, _) in layout.items():
        if stored[name].dtype != dtype:
            got = stored[name].dtype
            raise ArtifactError(f"{file}: tensor {name} is {got}, expected {dtype}", _HINT)
    return {one.name: _tensor(one, manifest.schemes.get(one.name), stored, file) for one in table}


def _layout(parameter: Parameter, scheme: Scheme | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of what holds a parameter in the file, in its order there."""
    name = parameter.name
    if scheme is None:
        return {name: ("F32", parameter.shape)}
    rows, columns = _out_in(parameter)
    groups = (rows, columns // scheme.group) if scheme.group else (rows,)
    scales = {f"{name}.scales": ("F16" if scheme.group else "F32", groups)}
    if scheme.bits == 8:
        return {**scales, name: ("I8", (rows, columns))}
    return {**scales, f"{name}.minimums": ("F16", groups), name: ("U8", (rows, columns // 2))}


def _out_in(parameter: Parameter) -> tuple[int, int]:
    one, other = parameter.shape
    return (other, one) if parameter.layout == "in_out" else (one, other)


def _tensor(
    parameter: Parameter, scheme: Scheme | None, stored: Mapping[str, StoredTensor], file: Path
) -> LazyTensor:
    name = parameter.name
    if scheme is None:
        return view_tensor(stored[name].data, "F32", parameter.shape)
    integers = LazyIntegers(scheme, partial(_integers, name, scheme, stored, file), True)
    transposed = parameter.layout == "in_out"
    read = partial(dequantized, integers, transposed)
    return LazyTensor(parameter.shape, "F32", read, integers=integers)


def _integers(
    name: str, scheme: Scheme, stored: Mapping[str, StoredTensor], file: Path
) -> QuantizedTensor:
    """The matrix, in views of the file."""
    scales = _array(stored[f"{name}.scales"], np.float16 if scheme.group else np.float32)
    minimums = _array(stored[f"{name}.minimums"], np.float16) if scheme.bits == 4 else None
    values = _array(stored[name], np.uint8 if scheme.bits == 4 else np.int8)
    matrix = QuantizedTensor(scheme.bits, scheme.group, values, scales, minimums)
    if not matrix.sound:
        raise ArtifactError(
            f"{file}: tensor {name} has a scale that is not finite, or an integer of -128", _HINT
        )
    return matrix


def _array(stored: StoredTensor, dtype: type[np.generic]) -> NDArray[Any]:
    """A view of the file, or a copy where the bytes are not aligned."""
    return np.require(stored.data.view(dtype).reshape(stored.shape), requirements="A")


def write_quantized(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    config: Decoder,
    manifest: QuantizationManifest,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the weights and the manifest into `folder`; `tensors` are of `with_quantization`.

    `advance` is told of each tensor. A matrix at a time is in memory. Raises EnvironmentFault where
    the disk is too small, which is found before anything is read, and ArtifactError.
    """
    entries: list[Entry] = []
    table = parameters(config)
    for one in (p for p in table if p.name not in manifest.schemes):
        entries.append(Entry(one.name, "F32", one.shape, partial(_floats, tensors[one.name])))
    for one in (p for p in table if p.name in manifest.schemes):
        entries += _entries(one, tensors[one.name], manifest.schemes[one.name])
    counted = [
        Entry(one.name, one.dtype, one.shape, partial(_counted, one, one.name in tensors, advance))
        for one in entries
    ]
    write_entries(folder / WEIGHTS, counted, {"format": "ms", "quant": manifest.quantization.quant})
    manifest.write(folder)


def weights_bytes(config: Decoder, manifest: QuantizationManifest) -> int:
    """What the tensors take in the file."""
    total = 0
    for one in parameters(config):
        scheme = manifest.schemes.get(one.name)
        total += scheme.nbytes(*_out_in(one)) if scheme else 4 * math.prod(one.shape)
    return total


def _floats(tensor: LazyTensor) -> Iterator[NDArray[Any]]:
    yield tensor.float32()


def _entries(parameter: Parameter, tensor: LazyTensor, scheme: Scheme) -> Iterator[Entry]:
    """The two or three tensors of a matrix, which is read once, for the first of them."""
    held: dict[str, NDArray[Any]] = {}

    def chunks(name: str) -> Iterator[NDArray[Any]]:
        if not held:
            assert tensor.integers is not None
            matrix = tensor.integers.read()
            held[f"{parameter.name}.scales"] = matrix.scales
            held[parameter.name] = matrix.values
            if matrix.minimums is not None:
                held[f"{parameter.name}.minimums"] = matrix.minimums
        yield held.pop(name)

    for name, (dtype, shape) in _layout(parameter, scheme).items():
        yield Entry(name, dtype, shape, partial(chunks, name))


def _counted(entry: Entry, counts: bool, advance: Callable[[int], None]) -> Iterator[NDArray[Any]]:
    yield from entry.chunks()
    if counts:
        advance(1)
