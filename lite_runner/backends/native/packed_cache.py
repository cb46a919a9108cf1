"""The packed layers of a model: mapped from the user's cache, made once, or packed in memory.

An entry's name is a hash of what its layers are made from, so copied and renamed checkpoints share
one. It holds a safetensors file with a U8 tensor per layer (`embedding`, `blocks.N.attention`,
`blocks.N.feed_forward`, `head`), each at a cache line of the file, and in __metadata__ its SHA-256.

The kernels follow the offsets in a layer unchecked. So no layer is used before its digest has been
compared: it is bytes that write_packed wrote, for a model of this description and this FORMAT. The
cache is the user's own (mode 700); who may write it could forge the digests too.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lite_runner import progress
from lite_runner.architectures import network_code
from lite_runner.architectures.spec import Decoder
from lite_runner.config.sections import Ranks
from lite_runner.errors import ArtifactError, EnvironmentFault
from lite_runner.model import ModelFiles
from lite_runner.native import structs
from lite_runner.native.structs import (
    ALIGNMENT,
    WHOLE,
    Block,
    Packed,
    PoolLayout,
    PoolLayouts,
    Room,
    Share,
    aligned,
)
from lite_runner.system import user_cache
from lite_runner.system.files import cache_dir, new_folder, readable
from lite_runner.system.user_cache import cannot_hold, digest_of, known_of_file, of_file, state_of
from lite_runner.weights import HUGE_PAGE
from lite_runner.weights.checkpoint import rank_folders
from lite_runner.weights.formats.gguf_file import parts_of
from lite_runner.weights.formats.safetensors_file import metadata_of, stored_tensors

if TYPE_CHECKING:
    from lite_runner.weights.lora.adapter import Adapter, LoraSize

FILE = "layers.safetensors"
FORMAT = 18  # of the layers; changes with the layout that the kernels read
AGAIN = "remove it from the cache: the next run packs the model again"
# Files of a folder that are hashed: weights, shards' manifests and strategies, an index.
_SUFFIXES = {".safetensors", ".gguf", ".ckpt", ".bin", ".pth", ".pt", ".json"}
_ENTRY_BYTES = 280  # of a tensor in the header, at most
_PREFIX = 8  # bytes of the header's length
_THREADS = 4  # hashing releases the GIL
_DAMAGED = "damaged layers"  # cached about a file


def packed_model(
    files: ModelFiles,
    lora: LoraSize | None,
    *,
    name: str,
    cached: bool,
    ranks: Ranks,
    share: Share = WHOLE,
) -> list[Packed]:
    """The layers, with room for adapters: mapped from the cache, and packed into it first if
    missing; packed in memory if not `cached`, if the cache cannot hold them, or for tensor-parallel
    ranks with a `share` of the model. Each of several `ranks` calls this; the first of the replicas
    packs for all. Raises RunnerError.
    """
    if not is_cached(files, share, cached=cached):
        return _in_memory(files, lora, name, ranks, share)
    entry, first = entry_of(files), ranks.rank == 0
    layers = _found(entry, files, lora, name) if first else None
    reason = _pack_into(entry, files, name) if first and layers is None else ""
    if reason := _of_first(ranks, reason):
        if first:
            progress.note(
                f"{name} is packed in memory, at each start: {reason} (LITE_RUNNER_CACHE=FOLDER"
                " names another folder for the cache)"
            )
        return _in_memory(files, lora, name, ranks, share)
    user_cache.use(entry)
    state = _state(entry / FILE)
    verified = _of_first(ranks, state) == state  # otherwise the first rank is on another machine
    return layers or open_packed(entry / FILE, files.model, lora, verified=verified)


def _of_first(ranks: Ranks, text: str) -> str:
    if ranks.size == 1:
        return text
    from lite_runner.backends.collectives import broadcast

    return broadcast(ranks, text)


def entry_of(files: ModelFiles) -> Path:
    """The folder in the cache for the layers of a checkpoint; its name is a hash of the content
    that they are made from, not of names or paths."""
    assert files.path is not None
    made_from = {
        "format": FORMAT,
        "model": asdict(files.model),
        "base": files.base and asdict(files.base),
        "network": network_code(files.model),
        "weights": content_digest(files.path),
        "strategy": files.strategy and content_digest(files.strategy),
        "adapter": files.adapter and _merged_from(files.adapter),
        "quantization": asdict(files.quantization),
        "rounded": files.rounded,
    }
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]
    return cache_dir() / user_cache.PACKED / key


def content_digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, an index, or a part of a split file, that of the names and
    digests of the files beside it, and in the folders of ranks, that hold weights. A large file is
    read again only after it changed."""
    parts = parts_of(path)
    if path.is_file() and path.suffix != ".json" and len(parts) == 1:
        return digest_of(path)
    folder = path if path.is_dir() else path.parent
    # No other folders: runs may write run folders to the one with the weights.
    folders = (folder, *(rank for _, rank in rank_folders(folder)))
    beside = [one for each in folders for one in sorted(each.iterdir())]
    every = parts if len(parts) > 1 else beside
    files = [one for one in every if one.suffix in _SUFFIXES and one.is_file()]
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(digest_of, files)
        whole = hashlib.sha256()
        for file, digest in zip(files, digests, strict=True):
            whole.update(f"{file.relative_to(folder).as_posix()}\0{digest}\0".encode())
    return whole.hexdigest()


def _merged_from(adapter: Adapter) -> tuple[str, Mapping[str, float]]:
    """The content of an adapter, and the scale of each weight, which the config may set."""
    scales = {name: pair.scale for name, pair in adapter.pairs.items()}
    return content_digest(adapter.folder), scales


def is_cached(files: ModelFiles, share: Share, *, cached: bool) -> bool:
    """True if the packed layers go to the cache: weights of a file, of which this rank has all."""
    return cached and share.count == 1 and files.held is None and files.path is not None


def packed_memory(
    files: ModelFiles, ranks: Ranks, share: Share, *, cached: bool
) -> tuple[int, int]:
    """Bytes of a rank's packed layers, and further bytes while packing: the size of cached layers,
    else estimated from the checkpoint's headers."""
    if is_cached(files, share, cached=cached):
        with suppress(OSError):  # not there
            return (entry_of(files) / FILE).stat().st_size, 0
    return _packed_sizes(files, ranks, share)


def _packed_sizes(files: ModelFiles, ranks: Ranks, share: Share) -> tuple[int, int]:
    """As `packed_memory`, from the headers."""
    from lite_runner.weights.read_ahead import loading_peak, native_bytes

    dequantize = files.quantization.quant == "none"
    unread = replace(files, verified=True)  # they are verified when they are read
    tensors = unread.tensors(ranks, vocab_parallel=share.vocab_parallel)
    sizes = {name: native_bytes(one, dequantize=dequantize) for name, one in tensors.items()}
    packed = sum(one.resident for one in sizes.values())
    return packed, max(0, loading_peak(sizes) - packed)


def _found(entry: Path, files: ModelFiles, lora: LoraSize | None, name: str) -> list[Packed] | None:
    """The layers in the cache; None if missing or incomplete."""
    if not user_cache.use(entry):
        return None
    try:
        return open_packed(entry / FILE, files.model, lora)
    except ArtifactError as error:
        progress.note(
            f"the packed {name} in the cache is damaged, and packed again: {error.message}"
        )
        return None


def _pack_into(entry: Path, files: ModelFiles, name: str) -> str:
    """Pack the layers into the cache; returns the reason if that fails, else ""."""
    if reason := cannot_hold(entry.parent, _packed_sizes(files, Ranks(), WHOLE)[0]):
        return reason
    try:
        with (
            new_folder(entry) as folder,
            (folder / FILE).open("wb") as file,
            _packing(files, f"pack {name}, once") as layers,
        ):
            write_packed(file, files.model, lambda room: layers(room=room))
    except EnvironmentFault as error:
        return error.message
    known_of_file(_DAMAGED, entry / FILE, [])
    size = (entry / FILE).stat().st_size
    progress.note(f"the packed {name} is in the cache from now on: {readable(size)}")
    return ""


def _state(file: Path) -> str:
    """The state of a file; "" where there is none."""
    try:
        return state_of(file.stat())
    except OSError:
        return ""


def _in_memory(
    files: ModelFiles, lora: LoraSize | None, name: str, ranks: Ranks, share: Share
) -> list[Packed]:
    step = f"pack {name}"
    if files.held is not None:
        step = "pack the parameters"
    elif files.path is None:
        step = "make random weights"
    with _packing(files, step, ranks, share) as layers:
        return list(layers(lora=lora))


@contextmanager
def _packing(
    files: ModelFiles,
    name: str,
    ranks: Ranks = Ranks(),  # noqa: B008  (frozen)
    share: Share = WHOLE,
) -> Iterator[partial[Iterator[Packed]]]:
    """`pack` of the files' weights, with a progress line."""
    from lite_runner.native.packed_model import pack
    from lite_runner.weights.quantization.quantize import describe, describe_blocks
    from lite_runner.weights.read_ahead import QuantizedWeights

    tensors = files.tensors(ranks, vocab_parallel=share.vocab_parallel)
    quantization = files.quantization
    if quantization.rounds:
        progress.note(describe(tensors, quantization))
    elif quantization.keeps_blocks and (line := describe_blocks(tensors.values())):
        progress.note(line)
    with progress.step(name, len(tensors), "tensors", phase="pack") as step:
        weights = QuantizedWeights(tensors, files.model, step.advance)
        try:
            yield partial(
                pack,
                files.model,
                weights,
                rounded_input=files.bfloat16_input or quantization.rounds_inputs,
                dequantize=quantization.quant == "none",
                share=share,
            )
        finally:
            weights.close()


def layer_names(model: Decoder) -> list[str]:
    """Names of the layers in the file, in the order of computation."""
    blocks = [
        f"blocks.{layer}.{kind}"
        for layer in range(model.num_layers)
        for kind in ("attention", "feed_forward")
    ]
    return ["embedding", *blocks, "head"]


class _TwoRooms:
    """Two buffers in turn: a layer is packed in one while the other is written. Zeroing used memory
    costs a fraction of new pages."""

    def __init__(self) -> None:
        self._now, self._next = aligned(0), aligned(0)

    def __call__(self, nbytes: int) -> Block:
        """See structs.Room; valid until the call after the next."""
        self._now, self._next = self._next, self._now
        if self._now.nbytes < nbytes:
            self._now = aligned(nbytes)
        else:
            self._now[:nbytes] = 0
        return self._now[:nbytes]


def write_packed(
    file: IO[bytes], model: Decoder, pack_in: Callable[[Room], Iterable[Packed]]
) -> None:
    """Write the layers that `pack_in` packs, each while the next is packed. Sizes and digests are
    known only then, so the header, padded to a sufficient size, is written last.

    All is written by whole huge pages: the page cache then has the file in such, and the processes
    that map it read 1.3 times as fast from it as from pages of 4 KiB.
    """
    names = layer_names(model)
    start = -(-(_PREFIX + _ENTRY_BYTES * len(names)) // ALIGNMENT) * ALIGNMENT
    rest = bytearray(start)  # of a huge page, not written yet
    header: dict[str, Any] = {}
    digests = {"model": _digest_of(model)}
    at = 0

    def write(name: str, block: Block) -> None:
        fits = -len(rest) % HUGE_PAGE
        whole = fits + max(0, block.nbytes - fits) // HUGE_PAGE * HUGE_PAGE
        rest.extend(block.data[:fits])
        if len(rest) % HUGE_PAGE == 0:
            file.write(rest)
            file.write(block.data[fits:whole])
            rest.clear()
            rest.extend(block.data[whole:])
        digests[name] = hashlib.sha256(block.data).hexdigest()

    with ThreadPoolExecutor(1, thread_name_prefix="write-packed") as writer:
        written: Future[None] | None = None
        for name, layer in zip(names, pack_in(_TwoRooms()), strict=True):
            size = layer.block.nbytes  # a multiple of ALIGNMENT
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
            if written is not None:
                written.result()  # its room is the next one
            written = writer.submit(write, name, layer.block)
        if written is not None:
            written.result()
    file.write(rest)
    header["__metadata__"] = digests
    text = json.dumps(header, separators=(",", ":")).encode().ljust(start - _PREFIX)
    assert len(text) == start - _PREFIX
    file.seek(0)
    file.write(len(text).to_bytes(_PREFIX, "little") + text)


def open_packed(
    path: Path, model: Decoder, lora: LoraSize | None = None, *, verified: bool = False
) -> list[Packed]:
    """The layers of a file, as `pack` returns them: views of the mapped file. With `lora` their
    structs say where adapters are, in this process only.

    Raises ArtifactError for other bytes than those written, unless they are `verified`, and for the
    layers of another model.
    """
    digests, names = metadata_of(path), layer_names(model)
    if not verified:
        _check_digests(path, digests)
    stored = stored_tensors(path, private=True)
    if stored.keys() != set(names) or digests.get("model") != _digest_of(model):
        raise ArtifactError(f"{path}: the layers are those of another model", AGAIN)
    layouts = PoolLayouts(model, lora).every()
    found = []
    for index, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        tensor = stored[name]
        if tensor.dtype != "U8" or len(tensor.shape) != 1:
            raise ArtifactError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}", AGAIN)
        block = tensor.data
        if block.ctypes.data % ALIGNMENT:
            raise ArtifactError(f"{path}: {name} does not start at a cache line", AGAIN)
        if layout is not None:
            _set_adapters(block, index, len(names), layout)
        found.append(Packed(block, layout))
    return found


def _digest_of(model: Decoder) -> str:
    described = json.dumps([FORMAT, asdict(model)], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()


def _check_digests(path: Path, digests: Mapping[str, str]) -> None:
    """Raise ArtifactError for a file whose bytes changed since it was written; like `digest_of` it
    is read again only after it changed."""

    def damaged() -> list[str]:
        stored = stored_tensors(path)
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(lambda one: hashlib.sha256(one.data).hexdigest(), stored.values())
            pairs = zip(stored, found, strict=True)
            return [name for name, digest in pairs if digest != digests.get(name)]

    if wrong := of_file(_DAMAGED, path, damaged):
        raise ArtifactError(
            f"{path}: {', '.join(wrong[:3])}: not the bytes that were written", AGAIN
        )


def _set_adapters(block: Block, index: int, count: int, layout: PoolLayout) -> None:
    """Write the offsets of a layer's adapters to its header."""
    kinds: Sequence[Any] = (structs.AttentionLayer, structs.FeedForwardLayer)
    kind = kinds[(index - 1) % 2]
    if index == 0:
        kind = structs.EmbeddingLayer
    elif index == count - 1:
        kind = structs.HeadLayer
    at = kind.adapters.offset
    parts = bytes(layout.parts())
    block[at : at + ctypes.sizeof(structs.LoraPair)] = np.frombuffer(parts, np.uint8)
