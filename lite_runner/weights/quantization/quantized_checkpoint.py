"""A quantized checkpoint: a folder with model.safetensors and quantization.json, its manifest.

A matrix NAME [out, in] is NAME (I8, or U8 with two columns a byte), NAME.scales (F32 [out], or F16
[out, groups]) and, of 4 bits, NAME.minimums (F16 [out, groups]); what each means,
weights/quantized.py says. All else is F32. Names are MindFormers', and matrices are [out, in]
where MindFormers holds [in, out] too. The model's sizes are in config.json.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lite_runner import progress
from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.quantization import QuantGroup, Quantization, Scheme, schemes
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import sha256_of
from lite_runner.system.user_cache import digest_of
from lite_runner.weights import LazyIntegers, LazyTensor, watched
from lite_runner.weights.formats.safetensors_file import (
    Entry,
    StoredTensor,
    counted,
    read_once,
    stored_tensors,
    view_tensor,
    write_entries,
)
from lite_runner.weights.layouts import check_tensors
from lite_runner.weights.manifest_file import FileName, Sha256, read_manifest, write_manifest
from lite_runner.weights.quantization.quantize import dequantized
from lite_runner.weights.quantization.quantized import QuantizedTensor, check_columns

MANIFEST, WEIGHTS = "quantization.json", "model.safetensors"
SCHEMA = 1
MAX_BYTES = 16 << 20
_LARGE = 1 << 28  # bytes of a file from which hashing shows progress
_HASHING = threading.Lock()
_HINT = "write it again (run_mode=quantize), or copy the whole folder again"


@dataclass(frozen=True)
class QuantizationManifest:
    """The content of quantization.json."""

    quant: Literal["a16w8", "a16w4", "a8w8"]
    group: int
    source: str  # the checkpoint that was quantized
    tensors: Mapping[str, Scheme]  # matrices, by canonical name
    sha256: Sha256  # of the weights
    files: Mapping[FileName, Sha256]  # beside the weights
    modules_to_not_convert: tuple[str, ...] = ()
    finer: tuple[str, ...] = ()  # linear layers with 8 bits, where others have 4

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.quant, self.group, self.modules_to_not_convert, self.finer)

    def check_files(self, folder: Path) -> None:
        """Raise ArtifactError where a file beside the weights has changed."""
        for name, expected in self.files.items():
            path = folder / name
            if not path.is_file() or sha256_of(path) != expected:
                raise ArtifactError(f"{path}: missing, or another file than was written", _HINT)


def read_quantization(path: Path) -> QuantizationManifest | None:
    """The manifest beside the weights at `path`, file or folder; None where there is none.

    Raises ArtifactError where it is broken or edited.
    """
    file = (path if path.is_dir() else path.parent) / MANIFEST
    if not file.is_file() or (path.is_file() and path.name != WEIGHTS):
        return None
    what = f"the manifest of a quantized checkpoint (schema {SCHEMA})"
    manifest = read_manifest(
        file, QuantizationManifest, what, schema=SCHEMA, most=MAX_BYTES, hint=_HINT
    )
    try:
        _check_schemes(manifest)
    except ValueError as error:
        raise ArtifactError(f"{file}: not {what}: {error}", _HINT) from error
    return manifest


def _check_schemes(manifest: QuantizationManifest) -> None:
    """Raise ValueError for groups or matrices that the quantization does not have."""
    quantization = manifest.quantization
    groups = get_args(QuantGroup) if manifest.quant == "a16w4" else (0,)
    if manifest.group not in groups:
        raise ValueError(f"quant {manifest.quant!r} with group {manifest.group}")
    # 8-bit blocks of the source were kept.
    allowed = (quantization.linear, quantization.table, Scheme(8, 32))
    for name, scheme in manifest.tensors.items():
        if scheme not in allowed:
            raise ValueError(f"{name}: {scheme} with quant={quantization}")


def open_quantized(
    file: Path, manifest: QuantizationManifest, config: Decoder
) -> dict[str, LazyTensor]:
    """Every tensor of the model by its canonical name; matrices give their integers and, as F32,
    what these stand for.

    Raises ArtifactError where the file does not hold exactly what the manifest and `config` say;
    its bytes are compared with the manifest's sha256 before the first of them is used.
    """
    stored, table = stored_tensors(file), parameters(config)
    source = _Weights(file, manifest.sha256)
    wanted = schemes(config, manifest.quantization)
    if manifest.tensors.keys() != wanted.keys():
        odd = sorted(manifest.tensors.keys() ^ wanted.keys())
        raise ArtifactError(
            f"{file.parent / MANIFEST}: the matrices are not those of the model: "
            f"{', '.join(odd[:5])}",
            "check that model= and load_checkpoint= belong together, or use model=auto",
        )
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for one in table:
        scheme = manifest.tensors.get(one.name)
        if scheme is not None:
            check_columns(_out_in(one)[1], scheme, f"{file}: tensor {one.name}")
        layout |= _layout(one, scheme)
    shapes = {name: shape for name, (_, shape) in layout.items()}
    check_tensors({name: one.shape for name, one in stored.items()}, shapes, str(file))
    for name, (dtype, _) in layout.items():
        if stored[name].dtype != dtype:
            got = stored[name].dtype
            raise ArtifactError(f"{file}: tensor {name} is {got}, expected {dtype}", _HINT)
    return {one.name: _tensor(one, manifest.tensors.get(one.name), stored, source) for one in table}


@dataclass(frozen=True)
class _Weights:
    """The file of the weights and its expected SHA-256."""

    file: Path
    sha256: str

    def check(self) -> None:
        """Raise ArtifactError where the bytes have changed."""
        state = self.file.stat()
        with _HASHING:  # tensors are read by several threads: the first one hashes for all
            found = _sha256_of(self.file, state.st_size, state.st_mtime_ns)
        if found != self.sha256:
            raise ArtifactError(
                f"{self.file}: another file than the one that was written: sha256 {found[:16]}..., "
                f"{MANIFEST} says {self.sha256[:16]}...",
                _HINT,
            )


@lru_cache(maxsize=16)
def _sha256_of(file: Path, size: int, changed_ns: int) -> str:
    """The SHA-256, computed once for each state of a file; later reads come from the page cache."""
    large = size >= _LARGE
    with progress.step(f"verify {file.name}") if large else nullcontext():
        return digest_of(file)


def _layout(parameter: Parameter, scheme: Scheme | None) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of a parameter's tensors in the file, in file order."""
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
    return (other, one) if parameter.transposed else (one, other)


def _tensor(
    parameter: Parameter,
    scheme: Scheme | None,
    stored: Mapping[str, StoredTensor],
    source: _Weights,
) -> LazyTensor:
    name = parameter.name
    if scheme is None:
        floats = view_tensor(stored[name].data, "F32", parameter.shape)
        return watched(floats, lambda values: source.check())
    integers = LazyIntegers(scheme, partial(_integers, name, scheme, stored, source), True)
    transposed = parameter.transposed
    read = partial(dequantized, integers, transposed)
    return LazyTensor(parameter.shape, "F32", read, integers=integers)


def _integers(
    name: str, scheme: Scheme, stored: Mapping[str, StoredTensor], source: _Weights
) -> QuantizedTensor:
    """The matrix, as views of the file."""
    source.check()
    scales = _array(stored[f"{name}.scales"], np.float16 if scheme.group else np.float32)
    minimums = _array(stored[f"{name}.minimums"], np.float16) if scheme.bits == 4 else None
    values = _array(stored[name], np.uint8 if scheme.bits == 4 else np.int8)
    matrix = QuantizedTensor(scheme.bits, scheme.group, values, scales, minimums)
    if not matrix.sound:
        raise ArtifactError(
            f"{source.file}: tensor {name} has a scale that is not finite, or an integer of -128",
            _HINT,
        )
    return matrix


def _array(stored: StoredTensor, dtype: type[np.generic]) -> NDArray[Any]:
    """A view of the file, or a copy where the bytes are not aligned."""
    return np.require(stored.data.view(dtype).reshape(stored.shape), requirements="A")


def write_quantized(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    config: Decoder,
    quantization: Quantization,
    source: str,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Write the weights and the manifest into `folder`, which holds the files beside them;
    `tensors` are of `with_quantization`, `source` is the checkpoint that they are of.

    `advance` is called for each tensor. A matrix at a time is in memory. Raises EnvironmentFault if
    the disk is too small, which is found before anything is read, and ArtifactError.
    """
    matrices = schemes_of(tensors)
    table = sorted(parameters(config), key=lambda one: one.name in matrices)
    entries: list[Entry] = []
    for one in table:
        layout = _layout(one, matrices.get(one.name))
        arrays = partial(_arrays, one.name, tensors[one.name])
        entries += counted(read_once(layout, arrays), partial(advance, 1))
    write_entries(folder / WEIGHTS, entries, {"format": "ms", "quant": quantization.quant})
    beside = sorted(one.name for one in folder.iterdir() if one.is_file() and one.name != WEIGHTS)
    kept = quantization.kept
    plain = {
        "schema": SCHEMA,
        "quant": quantization.quant,
        "group": quantization.group,
        "source": source,
        "sha256": sha256_of(folder / WEIGHTS),
        "files": {name: sha256_of(folder / name) for name in beside},
        **({"modules_to_not_convert": kept} if kept else {}),
        **({"finer": quantization.finer} if quantization.finer else {}),
        "tensors": {name: {"bits": one.bits, "group": one.group} for name, one in matrices.items()},
    }
    write_manifest(folder / MANIFEST, plain)


def schemes_of(tensors: Mapping[str, LazyTensor]) -> dict[str, Scheme]:
    """The format of each quantized matrix."""
    return {name: one.integers.scheme for name, one in tensors.items() if one.integers is not None}


def weights_bytes(config: Decoder, matrices: Mapping[str, Scheme]) -> int:
    """Bytes of the tensors in the file."""
    total = 0
    for one in parameters(config):
        scheme = matrices.get(one.name)
        total += scheme.nbytes(*_out_in(one)) if scheme else 4 * math.prod(one.shape)
    return total


def _arrays(name: str, tensor: LazyTensor) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of `_layout`, of a parameter or a quantized matrix."""
    if tensor.integers is None:
        yield name, tensor.float32()
        return
    matrix = tensor.integers.read()
    yield f"{name}.scales", matrix.scales
    if matrix.minimums is not None:
        yield f"{name}.minimums", matrix.minimums
    yield name, matrix.values
