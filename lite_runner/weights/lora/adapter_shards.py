"""Adapters sharded for tensor parallelism, cached on disk: `rank_N/` with a file per adapter and a
manifest.

Every rank writes its own, the manifest last; shards that do not match the manifest are rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.hf import hf_from_model_config
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.system.files import make_folder, sha256_of
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair
from lite_runner.weights.lora.adapter_file import digest
from lite_runner.weights.lora.adapter_listing import check_inside, check_listed
from lite_runner.weights.lora.adapter_manifest import (
    AGAIN,
    MANIFEST,
    AdapterEntry,
    read_adapter_manifest,
    write_adapter_manifest,
)
from lite_runner.weights.lora.adapter_pieces import adapter_pieces, piece_shapes


def cached_shards(
    adapters: Sequence[Adapter],
    model: Decoder,
    ranks: Ranks,
    folder: Path,
    *,
    vocab_parallel: bool,
) -> list[Adapter]:
    """This rank's shards of full `adapters`, read from `folder`; missing or stale ones are written
    there first."""
    own = folder / f"rank_{ranks.rank}"
    cut = _cut(model, ranks, vocab_parallel)
    kept = _kept(own, cut)
    wanted = {adapter.name: digest(adapter) for adapter in adapters}
    stale = [
        one for one in adapters if one.name not in kept or kept[one.name].source != wanted[one.name]
    ]
    if stale:
        make_folder(own)
        for adapter in stale:
            pieces = adapter_pieces(adapter, model, ranks, vocab_parallel=vocab_parallel)
            file = own / f"{adapter.name}.safetensors"
            tensors = {
                f"{name}.lora_{half}": tensor
                for name, pair in pieces.pairs.items()
                for half, tensor in (("a", pair.a), ("b", pair.b))
            }
            write_safetensors(file, tensors, {})
            scale = {name: pair.scale for name, pair in pieces.pairs.items()}
            kept[adapter.name] = AdapterEntry(wanted[adapter.name], sha256_of(file), scale)
        write_adapter_manifest(own, cut, kept)
    names = [adapter.name for adapter in adapters]
    return open_shards(folder, model, ranks, names, vocab_parallel=vocab_parallel)


def open_shards(
    folder: Path,
    model: Decoder,
    ranks: Ranks,
    names: Sequence[str],
    *,
    vocab_parallel: bool,
    root: Path | None = None,
) -> list[Adapter]:
    """This rank's shards of the adapters of these names, verified against their manifest.

    Raises ArtifactError: no such adapter, another layout, changed, of another model, or outside
    `root`, where it is given.
    """
    own = folder / f"rank_{ranks.rank}"
    check_inside(root, own / MANIFEST)
    if not (own / MANIFEST).is_file():
        raise ArtifactError(f"{own}: no {MANIFEST} of adapters that are cut", AGAIN)
    manifest = read_adapter_manifest(own)
    for key, value in _cut(model, ranks, vocab_parallel).items():
        if (got := getattr(manifest, key)) != value:
            shown = "is another" if key == "model" else f"is {got}, expected {value}"
            raise ArtifactError(f"{own}: cut for other ranks: {key} {shown}", AGAIN)
    there = manifest.adapters
    check_listed(names, there, own)
    check_inside(root, *(own / f"{name}.safetensors" for name in names))
    shapes = piece_shapes(model, ranks, vocab_parallel=vocab_parallel)
    return [_open(own, name, there[name], shapes) for name in names]


def _open(
    own: Path, name: str, entry: AdapterEntry, shapes: Mapping[str, tuple[int, int]]
) -> Adapter:
    """One adapter of a manifest whose names were checked, [in, out] of each weight in `shapes`."""
    file = own / f"{name}.safetensors"
    if file.parent != own or not file.is_file() or not entry.scale:
        raise ArtifactError(f"{own}: the adapter {name!r} is not as {MANIFEST} says", AGAIN)
    if sha256_of(file) != entry.sha256:
        raise ArtifactError(f"{file}: has changed since it was written", AGAIN)
    found = open_safetensors(file)
    pairs = {}
    for weight, scale in entry.scale.items():
        a, b = found.get(f"{weight}.lora_a"), found.get(f"{weight}.lora_b")
        fits = (
            weight in shapes
            and a is not None
            and b is not None
            and len(a.shape) == len(b.shape) == 2
            and (a.shape[1], b.shape[0]) == shapes[weight]
            and a.shape[0] == b.shape[1]
        )
        if not fits or a is None or b is None:
            raise ArtifactError(f"{file}: {weight}: no pair of A and B that fits", AGAIN)
        pairs[weight] = LoraPair(a, b, scale)
    return Adapter(name, own, pairs)


def _cut(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, Any]:
    """What identifies a layout."""
    return {
        "tensor_index": ranks.tensor_index,
        "tp": ranks.tensor,
        "vocab_parallel": vocab_parallel,
        "model": hf_from_model_config(model),
    }


def _kept(own: Path, cut: Mapping[str, Any]) -> dict[str, AdapterEntry]:
    """The valid entries of the manifest: same layout, files unchanged."""
    try:
        manifest = read_adapter_manifest(own)
        if any(getattr(manifest, key) != cut[key] for key in cut):
            return {}
        return {
            name: entry
            for name, entry in manifest.adapters.items()
            if sha256_of(own / f"{name}.safetensors") == entry.sha256
        }
    except (ArtifactError, OSError, ValueError):  # ValueError: a name with a NUL
        return {}
