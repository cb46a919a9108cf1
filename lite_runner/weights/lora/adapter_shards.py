"""Adapters cut for tensor parallel, kept on disk: `rank_N/` with a file an adapter and a manifest.

Written by every rank for itself, the manifest last; what its manifest does not fit is cut anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.hf import hf_from_model_config
from lite_runner.config.ranks import Ranks
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.errors import ArtifactError
from lite_runner.system.files import atomic_write, make_folder, sha256_of
from lite_runner.system.json_file import read_json_object
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair, digest, is_listing
from lite_runner.weights.lora.adapter_pieces import adapter_pieces, piece_shapes
from lite_runner.weights.sharding.shard_manifest import MANIFEST, rank_folders
from lite_runner.weights.tensor import LazyTensor

SCHEMA = 1
_CUT_AGAIN = "cut them again: adapter_path= the whole adapters, auto_trans_ckpt=true"


def is_cut(path: Path) -> bool:
    """Whether `path` is a folder of rank_0, rank_1, ..., and not one whose listing names adapters
    like that."""
    return bool(rank_folders(path)) and not is_listing(path)


def cut_once(
    adapters: Sequence[Adapter],
    model: Decoder,
    ranks: Ranks,
    folder: Path,
    *,
    vocab_parallel: bool,
) -> list[Adapter]:
    """This rank's pieces of whole `adapters`, read from `folder`, where they are written first
    unless they are there already."""
    own = folder / f"rank_{ranks.rank}"
    cut = _cut(model, ranks, vocab_parallel)
    kept = _kept(own, cut)
    wanted = {adapter.name: digest(adapter) for adapter in adapters}
    stale = [one for one in adapters if kept.get(one.name, {}).get("source") != wanted[one.name]]
    if stale:
        make_folder(own)
        for adapter in stale:
            pieces = adapter_pieces(adapter, model, ranks, vocab_parallel=vocab_parallel)
            file = own / f"{adapter.name}.safetensors"
            tensors: dict[str, LazyTensor] = {}
            for name, pair in pieces.pairs.items():
                tensors |= {f"{name}.lora_a": pair.a, f"{name}.lora_b": pair.b}
            write_safetensors(file, tensors, {})
            kept[adapter.name] = {
                "source": wanted[adapter.name],
                "sha256": sha256_of(file),
                "scale": {name: pair.scale for name, pair in pieces.pairs.items()},
            }
        with atomic_write(own / MANIFEST) as file_:
            plain = {"schema": SCHEMA, **cut, "adapters": kept}
            file_.write((json.dumps(plain, indent=1) + "\n").encode())
    names = [adapter.name for adapter in adapters]
    return open_cut(folder, model, ranks, names, vocab_parallel=vocab_parallel)


def open_cut(
    folder: Path,
    model: Decoder,
    ranks: Ranks,
    names: Sequence[str],
    *,
    vocab_parallel: bool,
) -> list[Adapter]:
    """This rank's pieces of the adapters of these names, compared with their manifest.

    Raises ArtifactError: no such adapter, cut otherwise, changed, or of another model.
    """
    own = folder / f"rank_{ranks.rank}"
    if not (own / MANIFEST).is_file():
        raise ArtifactError(f"{own}: no {MANIFEST} of adapters that are cut", _CUT_AGAIN)
    manifest = read_json_object(own / MANIFEST)
    for key, value in _cut(model, ranks, vocab_parallel).items():
        if manifest.get(key) != value:
            shown = "is another" if key == "model" else f"is {manifest.get(key)}, expected {value}"
            raise ArtifactError(f"{own}: cut for other ranks: {key} {shown}", _CUT_AGAIN)
    there = manifest.get("adapters")
    if manifest.get("schema") != SCHEMA or not isinstance(there, dict):
        raise ArtifactError(f"{own / MANIFEST}: no manifest of adapters", _CUT_AGAIN)
    for name in names:
        if name not in there:
            raise ArtifactError(
                f"{own}: no adapter {name!r}{did_you_mean(nearest(name, there))}",
                f"it has: {', '.join(list(there)[:20])}",
            )
    shapes = piece_shapes(model, ranks, vocab_parallel=vocab_parallel)
    return [_open(own, name, there[name], shapes) for name in names]


def _open(own: Path, name: str, entry: Any, shapes: Mapping[str, tuple[int, int]]) -> Adapter:
    """One adapter of a manifest whose names were checked, [in, out] of each weight in `shapes`."""
    file = own / f"{name}.safetensors"
    scales = entry.get("scale") if isinstance(entry, dict) else None
    if file.parent != own or not file.is_file() or not isinstance(scales, dict) or not scales:
        raise ArtifactError(f"{own}: the adapter {name!r} is not as {MANIFEST} says", _CUT_AGAIN)
    if sha256_of(file) != entry.get("sha256"):
        raise ArtifactError(f"{file}: has changed since it was written", _CUT_AGAIN)
    found = open_safetensors(file)
    pairs = {}
    for weight, scale in scales.items():
        a, b = found.get(f"{weight}.lora_a"), found.get(f"{weight}.lora_b")
        fits = (
            weight in shapes
            and a is not None
            and b is not None
            and len(a.shape) == len(b.shape) == 2
            and (a.shape[1], b.shape[0]) == shapes[weight]
            and a.shape[0] == b.shape[1]
            and type(scale) in (int, float)
        )
        if not fits or a is None or b is None:
            raise ArtifactError(f"{file}: {weight}: no pair of A and B that fits", _CUT_AGAIN)
        pairs[weight] = LoraPair(a, b, float(scale))
    return Adapter(name, own, pairs)


def _cut(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, Any]:
    """What says whether two cuts are one."""
    return {
        "tensor_index": ranks.tensor_index,
        "tp": ranks.tensor,
        "vocab_parallel": vocab_parallel,
        "model": hf_from_model_config(model),
    }


def _kept(own: Path, cut: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a manifest that is there, fits, and whose files are as it says; else none."""
    try:
        manifest = read_json_object(own / MANIFEST)
        if manifest["schema"] != SCHEMA or any(manifest[key] != cut[key] for key in cut):
            return {}
        return {
            name: entry
            for name, entry in manifest["adapters"].items()
            if sha256_of(own / f"{name}.safetensors") == entry["sha256"]
        }
    except (ArtifactError, OSError, KeyError, TypeError, AttributeError):
        return {}
