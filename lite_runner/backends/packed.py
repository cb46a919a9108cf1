"""Packed layers as a backend: the native kernels without MindSpore, their file mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lite_runner.backends.native import NativeBackend, NativeOptions
from lite_runner.backends.step_sizes import SMALLEST_CACHE
from lite_runner.config.quantization import CacheType
from lite_runner.mindir.manifest import Manifest
from lite_runner.native.lora_pool import LoraSize
from lite_runner.native.model import NativeModel
from lite_runner.native.packed_file import open_packed
from lite_runner.records import dataclass
from lite_runner.weights.lora.adapter import Adapter


@dataclass(frozen=True)
class PackedOptions:
    """What a run chooses of packed layers, and of no other exported model."""

    length: int = SMALLEST_CACHE  # maximum tokens per cache slot
    cache: CacheType = "fp32"
    lora: LoraSize | None = None  # adapter slots; None: base model only
    adapters: Sequence[Adapter] = ()


def open_packed_layers(
    path: Path, manifest: Manifest, slots: int, threads: int | None, chosen: PackedOptions
) -> NativeBackend:
    """The backend of the layers in a file, with `slots` cache slots; `threads` None: one per
    processor. Raises ArtifactError where they are not of the manifest's model."""
    assert manifest.operators is not None
    rounded = manifest.operators.rounded_input
    layers = open_packed(path, manifest.model, chosen.lora, rounded_input=rounded)
    model = NativeModel(manifest.model, layers, chosen.lora.slots if chosen.lora else 0)
    sizes = NativeOptions(slots, chosen.length, chosen.cache, lora=chosen.lora)
    return NativeBackend(manifest.model, model, sizes, chosen.adapters, threads=threads)
