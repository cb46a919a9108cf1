"""Importance matrices: how large the inputs of each matrix are on a text, as llama.cpp's imatrix
files have them, of both forms, and as they are measured here.

.dat, little endian: the number of matrices, and of each the length of its name, the name, the calls
and the values that were added up, their number, and the sums of the squares of each input (float32,
the experts of a layer one after the other). GGUF: NAME.in_sum2 [experts, in] and NAME.counts.
Names are those of a GGUF file's tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.system.files import read_small, temporary_folder
from lite_runner.weights import LazyTensor
from lite_runner.weights.formats.gguf_file import looks_like_gguf, open_gguf
from lite_runner.weights.quantization.calibration import Product, layers_on

Importance = dict[str, NDArray[np.float32]]  # name in a GGUF file -> [experts or 1, in]
MAX_BYTES = 1 << 30
_HINT = "write it again with llama-imatrix, or leave it out: quantize.data= may be a text"


def measured_importance(
    tensors: Mapping[str, LazyTensor],
    model: Decoder,
    texts: NDArray[np.int32],
    product: Product = np.matmul,
    advance: Callable[[int], None] = lambda count: None,
) -> Importance:
    """The importance of the inputs of linear layers, for the token ids of `texts` [n, T]. A
    layer at a time is in memory as floats; `advance` is called for each. Raises ArtifactError."""
    found: dict[str, dict[int, NDArray[np.float32]]] = {}
    for layer, ours in layers_on(tensors, model, texts, whole=False, product=product):
        for one in ours:
            if one.is_linear and one.gguf:
                matrix = layer.matrix(one)
                # Nothing is known of an expert that no token was routed to.
                squares = np.ones(matrix.values.shape[1], np.float32)
                if matrix.inputs is not None:
                    squares = matrix.inputs.gram.astype(np.float32) / texts.size
                found.setdefault(one.gguf, {})[one.expert or 0] = squares
        advance(1)
    return {name: np.stack([each[k] for k in sorted(each)]) for name, each in found.items()}


def read_importance(path: Path, model: Decoder) -> Importance:
    """The importance of a file of llama.cpp, checked against the model. Raises ArtifactError."""
    read = _of_gguf(path) if looks_like_gguf(path) else _of_dat(path)
    experts = (
        1 if model.sparse is None or model.sparse.experts is None else model.sparse.experts.count
    )
    known = {one.gguf: one for one in parameters(model) if one.gguf}
    found: Importance = {}
    for name, values in read.items():
        one = known.get(name)
        if one is None:
            continue  # of layers for multi-token prediction
        columns = one.shape[0] if one.transposed else one.shape[1] if len(one.shape) == 2 else 0
        rows = 1 if one.expert is None else experts
        if values.size not in (columns, rows * columns) or not columns:
            wanted = f"{columns:,}" if rows == 1 else f"{columns:,} of each of {rows} experts"
            raise _broken(path, f"{name} has {values.size:,} inputs, expected {wanted}")
        found[name] = values.reshape(-1, columns)
        if not np.isfinite(values).all() or values.min() < 0:
            raise _broken(path, f"{name} has values that cannot be means of squares")
    if not found:
        raise _broken(path, f"none of its {len(read)} matrices is of the model")
    return found


def importance_file(importance: Importance, text: str, tokens: int) -> bytes:
    """A GGUF file as llama-imatrix writes it."""
    import gguf

    with temporary_folder() as folder:
        path = folder / "imatrix.gguf"
        _write(gguf.GGUFWriter(path, "imatrix"), importance, text, tokens)
        return path.read_bytes()


def _write(writer: Any, importance: Importance, text: str, tokens: int) -> None:
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", [text])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", tokens)
    for name, values in importance.items():
        writer.add_tensor(f"{name}.in_sum2", values * np.float32(tokens))
        writer.add_tensor(f"{name}.counts", np.full((len(values), 1), tokens, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _of_gguf(path: Path) -> Importance:
    tensors = open_gguf(path).tensors
    found = {}
    for key, tensor in tensors.items():
        if not key.endswith(".in_sum2"):
            continue
        name = key.removesuffix(".in_sum2")
        if f"{name}.counts" not in tensors:
            raise _broken(path, f"{name} lacks its counts")
        if 0 in tensor.shape:
            raise _broken(path, f"{name} has no inputs")
        sums = tensor.lazy().float32()
        sums = sums.reshape(-1, sums.shape[-1])
        counts = tensors[f"{name}.counts"].lazy().float32().reshape(-1, 1)
        if counts.size not in (1, len(sums)):
            raise _broken(path, f"{name} has {counts.size} counts for {len(sums)} matrices")
        # Nothing is known of an expert that no token was routed to.
        found[name] = np.where(counts > 0, sums / np.maximum(counts, 1), 1).astype(np.float32)
    return found


def _of_dat(path: Path) -> Importance:
    try:
        data = read_small(path, "an importance matrix", MAX_BYTES)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    found, at = {}, 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(data) - at:
            raise _broken(path, f"it ends at byte {len(data):,}, within an entry")
        at += size
        return data[at - size : at]

    def number() -> int:
        return int(struct.unpack("<i", take(4))[0])

    for _ in range(number()):
        name = take(number()).decode("utf-8", "replace")
        calls, size = number(), number()
        values = np.frombuffer(take(4 * size), "<f4") / np.float32(max(calls, 1))
        found[name] = values[None]
    if not found:
        raise _broken(path, "it has no entries")
    return found


def _broken(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path}: not an importance matrix of this model: {what}", _HINT)
