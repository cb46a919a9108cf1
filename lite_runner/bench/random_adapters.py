"""LoRA adapters of random values: what mixing adapters costs does not depend on them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.target_modules import sites
from lite_runner.weights.tensor import LazyTensor

RANK = 8


def random_adapters(model: Decoder, count: int, rank: int = RANK) -> Sequence[Adapter]:
    """Adapters a0, a1, ... of every linear layer of the blocks, with values that are drawn when
    they are read, the same ones each time."""
    return [_adapter(model, f"a{number}", rank) for number in range(count)]


def _adapter(model: Decoder, name: str, rank: int) -> Adapter:
    pairs = {}
    for site in sites(model):
        if site.is_embedding or site.weight == "lm_head.weight":
            continue
        key = f"{name}/{site.weight}"
        a = _tensor((rank, site.width_in), 1 / site.width_in**0.5, f"{key}/a")
        b = _tensor((site.width_out, rank), 0.1 / rank**0.5, f"{key}/b")
        pairs[site.weight] = LoraPair(a, b, scale=1.0)
    return Adapter(name, Path(name), pairs)


def _tensor(shape: tuple[int, int], deviation: float, key: str) -> LazyTensor:
    return LazyTensor(shape, "F32", partial(_draw, shape, deviation, zlib.crc32(key.encode())))


def _draw(shape: tuple[int, int], deviation: float, seed: int) -> NDArray[np.float32]:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return values * np.float32(deviation)
