"""A packed model in a file, which is mapped: processes share its pages, and nothing is copied.

A safetensors file with one U8 tensor per layer: `embedding`, `blocks.N.attention`,
`blocks.N.feed_forward`, `head`. Each starts at a cache line of the file.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.native import structs, validation
from lite_runner.native.layout import ALIGNMENT, Block, Room, aligned
from lite_runner.native.lora_pool import LoraSize, PoolLayout
from lite_runner.native.packed_model import Packed, PoolLayouts
from lite_runner.native.versions import format_of
from lite_runner.weights.formats.safetensors_file import stored_tensors

AGAIN = "export the model again"
_ENTRY_BYTES = 160  # of a tensor in the header, at most
_PREFIX = 8  # bytes of the header's length


def layer_names(model: Decoder) -> list[str]:
    """Names of the layers in the file, in the order of computation."""
    blocks = [
        f"blocks.{layer}.{kind}"
        for layer in range(model.num_layers)
        for kind in ("attention", "feed_forward")
    ]
    return ["embedding", *blocks, "head"]


class _TwoRooms:
    """Two pieces of memory, by turns: a layer is packed in one while the other is written. To zero
    memory that was used before costs a fraction of new pages."""

    def __init__(self) -> None:
        self._now, self._next = aligned(0), aligned(0)

    def __call__(self, nbytes: int) -> Block:
        """See layout.Room; it holds until the next but one."""
        self._now, self._next = self._next, self._now
        if self._now.nbytes < nbytes:
            self._now = aligned(nbytes)
        else:
            self._now[:nbytes] = 0
        return self._now[:nbytes]


def write_packed(
    file: IO[bytes], model: Decoder, pack_in: Callable[[Room], Iterable[Packed]]
) -> int:
    """Write the layers that `pack_in` packs in a room, each while the next is packed; the oldest
    format version that has all.

    Their sizes are known only then, so the header, padded to a size that suffices, is written last.
    """
    names = layer_names(model)
    start = -(-(_PREFIX + _ENTRY_BYTES * len(names)) // ALIGNMENT) * ALIGNMENT
    file.seek(start)
    header: dict[str, Any] = {}
    at, version = 0, 1
    with ThreadPoolExecutor(1, thread_name_prefix="write-packed") as writer:
        written: Future[int] | None = None
        for name, layer in zip(names, pack_in(_TwoRooms()), strict=True):
            version = max(version, layer.since)
            if name not in ("embedding", "head"):
                version = max(version, format_of([layer.block]))
            size = layer.block.nbytes  # a multiple of ALIGNMENT
            header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
            if written is not None:
                written.result()  # its room is the next one
            written = writer.submit(file.write, layer.block.data)
        if written is not None:
            written.result()
    text = json.dumps(header, separators=(",", ":")).encode().ljust(start - _PREFIX)
    assert len(text) == start - _PREFIX
    file.seek(0)
    file.write(len(text).to_bytes(_PREFIX, "little") + text)
    return version


def open_packed(
    path: Path, model: Decoder, lora: LoraSize | None = None, *, rounded_input: bool = False
) -> list[Packed]:
    """The validated layers of a file, as `pack` returns them: views of the mapped file. With `lora`
    their headers say where adapters are, in this process only.

    Raises ArtifactError where they are not of this model; `rounded_input`: see matrices.matrix.
    """
    validation.check_model(str(path), model)
    stored, names = stored_tensors(path, private=True), layer_names(model)
    if stored.keys() != set(names):
        odd = sorted(stored.keys() ^ set(names))
        raise ArtifactError(
            f"{path}: {len(odd)} layers are missing or more than the model's, such as {odd[0]}",
            AGAIN,
        )
    layouts = PoolLayouts(model, lora).every()
    found = []
    for index, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        tensor = stored[name]
        if tensor.dtype != "U8" or len(tensor.shape) != 1:
            raise ArtifactError(f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}", AGAIN)
        block = tensor.data
        if block.ctypes.data % ALIGNMENT:
            raise ArtifactError(f"{path}: {name} does not start at a cache line", AGAIN)
        where = f"{path}: {name}"
        validation.check_layer(where, index, block, model, rounded_input=rounded_input)
        if layout is not None:
            _set_adapters(block, index, len(names), layout)
        found.append(Packed(block, layout))
    return found


def _set_adapters(block: Block, index: int, count: int, layout: PoolLayout) -> None:
    """Write where the adapters of a layer are to its header."""
    kinds: Sequence[Any] = (structs.AttentionLayer, structs.FeedForwardLayer)
    kind = kinds[(index - 1) % 2]
    if index == 0:
        kind = structs.EmbeddingLayer
    elif index == count - 1:
        kind = structs.HeadLayer
    at = kind.adapters.offset
    parts = bytes(layout.parts())
    block[at : at + ctypes.sizeof(structs.LoraPair)] = np.frombuffer(parts, np.uint8)
