"""KV cache of the native kernels: shapes, types and allocation."""

from __future__ import annotations

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.config.quantization import CacheType
from lite_runner.native.structs import PANEL

CHUNK = 128  # keys that are reduced together: the cache length is a multiple
CACHE_TYPES: dict[CacheType, type[np.generic]] = {
    "fp32": np.float32,
    "fp16": np.float16,
    "int8": np.int8,
}


def cached_positions(length: int) -> int:
    """Cache positions per slot for rows of at most `length` tokens."""
    return -(-length // CHUNK) * CHUNK


def cache_shapes(
    model: Decoder, slots: int, length: int, cache: CacheType
) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Shape and type of a layer's keys, values and their scales, by name; `length`: maximum tokens
    per slot. The first axis is slot-major.

    Keys: [slots * kv_heads, length / 32, head_dim, 32]; values: [slots * kv_heads, head_dim / 32,
    length, 32]; their scales, with int8: [slots * kv_heads, length], else [1, 1].
    """
    rows, dim, dtype = slots * model.n_kv_heads, model.head_dim, CACHE_TYPES[cache]
    positions = cached_positions(length)
    scaled = (rows, positions) if cache == "int8" else (1, 1)
    return {
        "keys": ((rows, positions // PANEL, dim, PANEL), dtype),
        "values": ((rows, -(-dim // PANEL), positions, PANEL), dtype),
        "key_scales": (scaled, np.float32),
        "value_scales": (scaled, np.float32),
    }
