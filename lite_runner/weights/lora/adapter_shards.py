"""Adapters sharded for tensor parallelism, sliced when read or cached on disk.

`rank_N/` holds a file per adapter and a manifest; every rank writes its own, the manifest last.
For a column-parallel layer B is split and A replicated; for a row-parallel layer A is split and B
replicated, and the product joins the layer's all-reduce. The embedding's adapter is replicated: it
is added after the all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from lite_runner import progress
from lite_runner.architectures import parameters
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import Range, dataclass
from lite_runner.system.files import make_folder, sha256_of
from lite_runner.system.user_cache import digest_of
from lite_runner.weights.formats import hf_from_model_config
from lite_runner.weights.formats.safetensors_file import open_safetensors, write_safetensors
from lite_runner.weights.lora.adapter import Adapter, LoraPair, sites
from lite_runner.weights.lora.adapter_reader import check_inside, check_listed, digest
from lite_runner.weights.manifest_file import Sha256, read_manifest, write_manifest
from lite_runner.weights.sharding.partition import Layout, sliced, strategy_of
from lite_runner.weights.sharding.shard_manifest import MANIFEST, MAX_RANKS

SCHEMA = 1
MAX_BYTES = 64 << 20
AGAIN = "shard them again: adapter_path= the whole adapters, auto_trans_ckpt=true"


@dataclass(frozen=True)
class AdapterEntry:
    """One adapter, whose file is named after it."""

    source: Sha256  # of the whole adapter
    sha256: Sha256  # of the file
    scale: Mapping[str, float]  # of each weight


@dataclass(frozen=True)
class AdapterManifest:
    """The shards of one rank."""

    tensor_index: Annotated[int, Range(0, MAX_RANKS - 1)]
    tp: Annotated[int, Range(1, MAX_RANKS)]
    vocab_parallel: bool
    model: Mapping[str, object]  # a config.json
    adapters: Mapping[str, AdapterEntry]


def cached_shards(
    adapters: Sequence[Adapter], model: Decoder, ranks: Ranks, folder: Path, *, vocab_parallel: bool
) -> list[Adapter]:
    """This rank's shards of full `adapters`, read from `folder`; missing, stale or damaged ones are
    written there first."""
    own = folder / f"rank_{ranks.rank}"
    cut = _cut(model, ranks, vocab_parallel)
    cached = _intact(own, cut)
    wanted = {adapter.name: digest(adapter) for adapter in adapters}
    stale = [
        one
        for one in adapters
        if one.name not in cached or cached[one.name].source != wanted[one.name]
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
            cached[adapter.name] = AdapterEntry(wanted[adapter.name], sha256_of(file), scale)
        entries = {name: asdict(entry) for name, entry in cached.items()}
        write_manifest(own / MANIFEST, {"schema": SCHEMA, **cut, "adapters": entries})
    names = [adapter.name for adapter in adapters]
    return open_shards(folder, model, ranks, names, vocab_parallel=vocab_parallel)


def _intact(own: Path, cut: Mapping[str, Any]) -> dict[str, AdapterEntry]:
    """The entries of the cached manifest whose files are unchanged; none of another layout. What is
    damaged is noted."""
    if not (own / MANIFEST).is_file():
        return {}
    try:
        manifest = _read_manifest(own)
    except ArtifactError:
        progress.note(f"{own / MANIFEST} is damaged, and the adapters are sharded again")
        return {}
    if any(getattr(manifest, key) != cut[key] for key in cut):
        return {}
    intact = {}
    for name, entry in manifest.adapters.items():
        file = own / f"{name}.safetensors"
        with suppress(OSError, ValueError):  # ValueError: a name with a NUL
            if digest_of(file) == entry.sha256:
                intact[name] = entry
                continue
        if file.exists():
            progress.note(f"{file} is damaged, and the adapter is sharded again")
    return intact


def _cut(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, Any]:
    """The layout of a rank's shards, for the manifest."""
    return {
        "tensor_index": ranks.tensor_index,
        "tp": ranks.tensor,
        "vocab_parallel": vocab_parallel,
        "model": hf_from_model_config(model),
    }


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
        raise ArtifactError(f"{own}: no {MANIFEST} of sharded adapters", AGAIN)
    manifest = _read_manifest(own)
    for key, value in _cut(model, ranks, vocab_parallel).items():
        if (got := getattr(manifest, key)) != value:
            shown = "is another" if key == "model" else f"is {got}, expected {value}"
            raise ArtifactError(f"{own}: sharded for other ranks: {key} {shown}", AGAIN)
    there = manifest.adapters
    check_listed(names, there, own)
    check_inside(root, *(own / f"{name}.safetensors" for name in names))
    shapes = _piece_shapes(model, ranks, vocab_parallel)
    return [_open(own, name, there[name], shapes) for name in names]


def _open(
    own: Path, name: str, entry: AdapterEntry, shapes: Mapping[str, tuple[int, int]]
) -> Adapter:
    """One adapter of a manifest with validated names; `shapes` has [in, out] of each weight."""
    file = own / f"{name}.safetensors"
    if file.parent != own or not file.is_file() or not entry.scale:
        raise ArtifactError(f"{own}: the adapter {name!r} is not as {MANIFEST} says", AGAIN)
    if digest_of(file) != entry.sha256:
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


def _read_manifest(folder: Path) -> AdapterManifest:
    """The manifest in a rank's folder. Raises ArtifactError: missing, broken or edited."""
    return read_manifest(
        folder / MANIFEST,
        AdapterManifest,
        f"the manifest of sharded adapters (schema {SCHEMA})",
        schema=SCHEMA,
        most=MAX_BYTES,
        hint=AGAIN,
        artifact=folder.parent,
    )


def adapter_pieces(
    adapter: Adapter, model: Decoder, ranks: Ranks, *, vocab_parallel: bool
) -> Adapter:
    """The shards that `ranks` holds of a full adapter of `model`."""
    if ranks.tensor == 1:
        return adapter
    layouts = _layouts(model, ranks, vocab_parallel)

    def piece(name: str, pair: LoraPair) -> LoraPair:
        of_a, of_b = layouts[name]
        a = sliced(pair.a, of_a.bounds(pair.a.shape, ranks.rank))
        return LoraPair(a, sliced(pair.b, of_b.bounds(pair.b.shape, ranks.rank)), pair.scale)

    return replace(adapter, pairs={name: piece(name, pair) for name, pair in adapter.pairs.items()})


def _piece_shapes(model: Decoder, ranks: Ranks, vocab_parallel: bool) -> dict[str, tuple[int, int]]:
    """Canonical name -> (in, out) of a rank's shard of every possible target weight."""
    layouts, found = _layouts(model, ranks, vocab_parallel), {}
    for site in sites(model):
        of_a, of_b = layouts[site.weight]
        found[site.weight] = site.width_in // of_a.parts[1], site.width_out // of_b.parts[0]
    return found


def _layouts(
    model: Decoder, ranks: Ranks, vocab_parallel: bool
) -> dict[str, tuple[Layout, Layout]]:
    """The layouts of A [r, in] and B [out, r] of each weight."""
    weights = strategy_of(model, ranks, vocab_parallel=vocab_parallel).layouts
    table, found = parameters(model), {}
    for site in sites(model):
        # A tied head is sharded as the embedding; adapters name it on its own.
        layout = weights.get(site.weight, weights[table[0].name])
        inputs, outputs = layout.tensor_map if site.transposed else layout.tensor_map[::-1]
        if site.is_embedding:
            inputs = outputs = ()
        matrix = layout.dev_matrix
        found[site.weight] = Layout(matrix, ((), inputs)), Layout(matrix, (outputs, ()))
    return found
