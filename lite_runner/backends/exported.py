"""Opens an exported model: its engine, and the backend of its layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lite_runner import native
from lite_runner.backends.base import Backend
from lite_runner.backends.engines.start import EngineOptions, check_operators, start_engine
from lite_runner.mindir.manifest import GraphName, Manifest, Operators

if TYPE_CHECKING:
    from lite_runner.backends.packed import PackedOptions


def open_exported(
    graphs: Mapping[GraphName, Path],
    manifest: Manifest,
    options: EngineOptions,
    *,
    slots: int,
    packed: PackedOptions | None = None,
) -> Backend:
    """Load the model with `slots` cache slots; `packed`: what a run may choose of packed layers
    alone. Raises RunnerError if that fails."""
    if manifest.layout == "packed":
        from lite_runner.backends.packed import PackedOptions, open_packed_layers

        check_operators(f"the exported {manifest.model_name}", options.device)
        chosen = packed or PackedOptions()
        return open_packed_layers(graphs["model"], manifest, slots, options.threads, chosen)
    if manifest.layout == "resizable":
        from lite_runner.backends.resizable import ResizableBackend

        return ResizableBackend(manifest, start_engine(graphs, manifest, options), slots)
    if manifest.operators is not None:
        return _open_native(graphs, manifest, manifest.operators, options, slots)
    from lite_runner.backends.dynamic import DynamicBackend
    from lite_runner.backends.no_cache import NoCacheBackend
    from lite_runner.backends.static_pair import StaticPairBackend

    engine = start_engine(graphs, manifest, options)
    if manifest.layout == "no_cache":
        return NoCacheBackend(manifest, engine)
    if manifest.layout == "static_pair":
        return StaticPairBackend(manifest, engine)
    return DynamicBackend(manifest, engine, slots)


def _open_native(
    graphs: Mapping[GraphName, Path],
    manifest: Manifest,
    operators: Operators,
    options: EngineOptions,
    slots: int,
) -> Backend:
    check_operators(f"the exported {manifest.model_name}", options.device)
    engine = start_engine(graphs, manifest, options)
    native.set_threads(options.threads)
    from lite_runner.backends.native_graph import NativeGraphBackend

    return NativeGraphBackend(manifest, operators, engine, slots)
