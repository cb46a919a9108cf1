"""Opens an exported model: its engine, and the backend of its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lite_runner import native
from lite_runner.backends.base import Backend
from lite_runner.backends.engines.start import EngineOptions, check_operators, start_engine
from lite_runner.backends.native import NativeBackend
from lite_runner.backends.step_sizes import SMALLEST_CACHE
from lite_runner.config.quantization import CacheType
from lite_runner.mindir.manifest import GraphName, Manifest, Operators
from lite_runner.native.lora_pool import LoraSize
from lite_runner.native.model import NativeModel, NativeOptions
from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True)
class PackedOptions:
    """What a run chooses of packed layers, and of no other exported model."""

    length: int = SMALLEST_CACHE  # maximum tokens per cache slot
    cache: CacheType = "fp32"
    lora: LoraSize | None = None  # adapter slots; None: base model only
    adapters: Sequence[Adapter] = ()


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
        return _open_packed(graphs["model"], manifest, options, slots, packed or PackedOptions())
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


def _open_packed(
    path: Path, manifest: Manifest, options: EngineOptions, slots: int, chosen: PackedOptions
) -> Backend:
    from lite_runner.native.packed_file import open_packed

    check_operators(f"the exported {manifest.model_name}", options.device)
    assert manifest.operators is not None
    rounds = manifest.operators.quant == "a8w8"
    layers = open_packed(path, manifest.model, chosen.lora, integer_input=rounds)
    model = NativeModel(manifest.model, layers, chosen.lora.slots if chosen.lora else 0)
    sizes = NativeOptions(slots, chosen.length, chosen.cache, lora=chosen.lora)
    return NativeBackend(manifest.model, model, sizes, chosen.adapters, threads=options.threads)


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
