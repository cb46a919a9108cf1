"""Which engine runs which layout of an exported model; the one to prefer first."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["lite", "lite-worker", "graph-cell", "native"]
ENGINES: dict[str, tuple[EngineName, ...]] = {
    "resizable": ("lite", "lite-worker"),
    "dynamic": ("graph-cell",),
    "static_pair": ("lite", "graph-cell"),
    "packed": ("native",),
    "no_cache": ("lite", "lite-worker", "graph-cell"),
}
