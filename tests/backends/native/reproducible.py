"""Hashes of the logits of native kernels that are to have the same bits on every processor.

    python -m tests.backends.native.reproducible

prints those of this processor, to be compared with EXPECTED. `steps_of` gives what the kernels are
called with, for a program of another processor: tests/native/test_arm.py.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.architectures.quantization import CacheType
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.native import model as native_model
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.weights.read_ahead import QuantizedWeights
from tests.backends.native.ranks import Case, model_of

# Of all kinds of positions, activations, matrices and caches: model, quant, cache.
EXPECTED: dict[tuple[str, str, CacheType], str] = {
    ("llama", "none", "fp32"): "b1b12045078a774e",
    ("llama", "a16w8", "fp16"): "124b4d7815c7f909",
    ("wide", "a16", "int8"): "12ac52f0348136c3",
    ("bloom", "a16w4", "fp32"): "f2e55303dd95ceb2",
    ("llama", "a8w8", "fp32"): "3b32d8cda8d2e0de",
    ("llama_rope_dynamic", "none", "fp32"): "4adb929df35418a3",
    ("bloom", "none", "fp16"): "1f983c4793516f3c",
    ("gemma2", "none", "fp32"): "b42b107b3c03c7fe",
    ("chatglm_6b", "none", "fp32"): "0e9503b13b8d9733",
    ("phi3_longrope", "none", "fp32"): "e230572d011be4b0",
    ("gpt_oss", "none", "fp32"): "737c8c33268c62fa",
    ("mixtral", "a16w4", "fp32"): "3612fa053fb76a04",
    ("qwen3_next", "a16w8", "fp32"): "4880a95bd27accd7",
    ("granitemoehybrid", "none", "fp16"): "61dfe14c0d211ff5",
}


def digest(case: str, quant: str, cache: CacheType, *, threads: int = 1) -> str:
    """A hash of logits of a prompt, and of steps behind it."""
    with _model(case, quant, cache, threads) as model:
        return hashed(_logits(model))


def hashed(logits: bytes) -> str:
    """As in EXPECTED."""
    return hashlib.sha256(logits).hexdigest()[:16]


def steps_of(case: str, quant: str, cache: CacheType) -> bytes:
    """The packed model, and the arguments of its steps: numbers of 64 bits, each with what lies
    behind it, in the order in which the driver of test_arm.py reads them."""
    with _model(case, quant, cache, 1) as backend:
        model = backend._model
        assert model is not None
        calls: list[tuple[NDArray, NDArray, int]] = []
        run = model.run

        def recorded(words: NDArray, table: NDArray, slots: None, rows: int) -> NDArray[np.float32]:
            calls.append((words.copy(), table.copy(), rows))
            return run(words, table, slots, rows)

        model.run = recorded  # type: ignore[method-assign, assignment]
        _logits(backend)
        bound = model._model
        sizes = ("prefix", "capacity", "vocabulary", "slots", "positions", "rope_rows")
        found = [_numbers(*(getattr(bound, name) for name in sizes), model._x.shape[1])]
        found += [struct.pack("<dq", bound.softcap, bound.count)]
        tables, caches = backend._pool.tables, iter(model._cache)
        found += [_numbers(bound.table_width, bound.blocks, tables.nbytes), tables.tobytes()]
        near = tables[:0] if backend._windows is None else backend._windows.tables
        found += [_numbers(bound.window, bound.window_blocks, near.nbytes), near.tobytes()]
        for index, block in enumerate(model._blocks):
            layer = model._bound[index]
            bytes_of = [
                len(next(caches).numbers) * layer.block_bytes if getattr(layer, name) else 0
                for name in native_model.CACHE
            ]
            state = layer.state_stride if layer.state else 0
            found += [_numbers(layer.windowed, layer.cache_type, layer.block_bytes, *bytes_of)]
            found += [_numbers(state, block.nbytes), block.tobytes()]
        found += [_numbers(len(calls))]
        for words, table, rows in calls:
            found += [_numbers(len(words), table.size, rows), words.tobytes(), table.tobytes()]
    return b"".join(found)


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


@contextmanager
def _model(case: str, quant: str, cache: CacheType, threads: int) -> Iterator[NativeBackend]:
    config, tensors = model_of(Case(case, quant=quant))
    options = NativeOptions(2, 64, cache)
    layers = pack(config, QuantizedWeights(tensors, config))
    model = NativeBackend(config, layers, options, threads=threads, reproducible=True)
    try:
        yield model
    finally:
        model.close()
        native.choose_kernels(reproducible=False)


def _logits(model: NativeBackend) -> bytes:
    config = model._config
    tokens = [int(7 * k * k + 3) % (config.vocab_size - 8) for k in range(30)]
    if config.prefix is not None:  # a mask, and the end of the prefix
        tokens[4], tokens[10] = config.prefix.mask_token_ids[0], config.prefix.end_token_id
    prompt = np.array(tokens, np.int32)
    found = [model.forward([Row(1, prompt, 0)])]
    found += [model.forward([Row(1, prompt[k : k + 1], 30 + k)]) for k in range(3)]
    return np.concatenate(found).tobytes()


if __name__ == "__main__":
    differing = 0
    for key, known in EXPECTED.items():
        now = digest(*key)
        differing += now != known
        print(f"    {key!r}: {now!r},".replace("'", '"'), "" if now == known else f"  # {known}")
    sys.exit(differing > 0)
