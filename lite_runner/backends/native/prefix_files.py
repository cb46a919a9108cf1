"""Prefixes of prompts in files: keys and values that another process, or an earlier one, computed.

A file holds a block of tokens in all layers. Its name is a hash of whatever its bits depend on: the
packed layers, the kernels, the type of the cache, the adapter, the rotary angles, the tokens, and
those of all blocks before. So what a file gives is, to the bit, what computing gives.

Most texts of a busy server never come again. What two requests share is always written, what one
alone has only within an allowance, which fills up slowly: disks wear out.

A file begins with a SHA-256 over its name and the rest: one that is damaged is removed, and its
tokens are computed again. Files appear complete or not at all (`atomic_write`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner import native, progress
from lite_runner.architectures.quantization import CacheType
from lite_runner.backends import StoredPrefix
from lite_runner.backends.adapter_slots import AdapterSlots
from lite_runner.backends.block_pool import Part
from lite_runner.errors import EnvironmentFault
from lite_runner.native.fingerprint import sources
from lite_runner.native.model import NativeModel
from lite_runner.records import dataclass
from lite_runner.system import environment, user_cache
from lite_runner.system.bucket import Bucket
from lite_runner.system.files import atomic_write, cache_dir, make_folder

BLOCK = 64  # tokens
FORMAT = 1  # of the files
QUEUED = 32 << 20  # most bytes queued for writing; the rest is not stored
UNSHARED = 512 << 20  # bytes to write at once of what one request alone has had, ...
UNSHARED_S = 1 << 20  # ... and then a second
PART = 4  # share of the cache's limit for prefixes: packed layers cost more to make
_DIGEST = 32  # bytes
_THREADS = 4  # hashing releases the GIL
_KEPT = 0.9  # of what prefixes may take, after the oldest were removed
_DEAREST = 16  # tokens that are read for one that is not computed
_REMEMBERED = 1 << 15  # blocks that are in files, and others with the request that had them


@dataclass(frozen=True)
class StoreSettings:
    """Settings of stored prefixes: the packed layers that they are of, and the cache limit."""

    layers: str  # digest of what the packed layers are made from
    limit: int | None  # bytes of the cache's entries; None: a share of the free disk


class PrefixFiles:
    """See `lite_runner.backends.StoredPrefixes`."""

    def __init__(
        self,
        model: NativeModel,
        table: NDArray[np.float32],
        adapters: AdapterSlots | None,
        cache: CacheType,
        settings: StoreSettings,
        reserve: Callable[[Part], None],
        usable: Callable[[int, int], int],
    ) -> None:
        """`table`: of the rotary angles; `cache`: what its keys and values are; `reserve`
        prepares a slot for tokens that are about to be restored; `usable`: see BlockPool."""
        self._model, self._adapters, self._limit = model, adapters, settings.limit
        self._reserve, self._usable = reserve, usable
        self.rotate(table)
        made_from = [FORMAT, BLOCK, settings.layers, sources(), native.instructions(), cache]
        made_from += [environment.multiplies_pairs()]  # those kernels round in attention
        self._root = hashlib.sha256(json.dumps(made_from).encode()).digest()
        self._folder = cache_dir() / user_cache.PREFIXES / self._root.hex()[:_DIGEST]
        self._known: set[str] = set()  # names of files that are there, or about to be
        self._had: dict[str, int] = {}  # names of blocks that were not written, and the request
        self._allowance = Bucket(UNSHARED, UNSHARED_S)
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="read-prefix")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-prefix")
        self._lock = threading.Lock()
        self._queued: dict[str, int] = {}  # bytes of blocks to write; guarded by the lock
        # The writer's own:
        self._most: int | None = None  # bytes of all prefixes
        self._room = 0  # bytes to write until they are counted again
        user_cache.use(self._folder)

    def rotate(self, table: NDArray[np.float32]) -> None:
        """Set another rotary table."""
        self._table = table
        self._angles: list[bytes] = []  # digests, by block

    def find(
        self, slot: int, tokens: NDArray[np.int32], adapter: str | None, start: int, cached: int
    ) -> StoredPrefix | None:
        first, names = start // BLOCK, self._names(tokens, adapter)
        if self._usable(slot, first * BLOCK) < first * BLOCK:
            first = 0
        folder = self._folder
        there = first
        while there < len(names) and (folder / names[there]).exists():
            there += 1
        with self._lock:  # those that were removed meanwhile are to be stored again
            self._known.difference_update(set(names[there:]) - self._queued.keys())
        gained, read = there * BLOCK - cached, (there - first) * BLOCK
        if gained < BLOCK or gained * _DEAREST < read:
            return None
        blocks: list[NDArray[np.uint8]] = []
        for name, block in zip(
            names[first:there], self._readers.map(self._read, names[first:there]), strict=True
        ):
            if block is None:
                self._known.discard(name)
                break
            blocks.append(block)
        end = (first + len(blocks)) * BLOCK
        if end - cached < BLOCK:
            return None
        for name in reversed(names[:there]):  # all later blocks need the first ones
            with contextlib.suppress(OSError):
                os.utime(folder / name)
        return StoredPrefix(slot, first * BLOCK, end, blocks)

    def restore(self, prefix: StoredPrefix) -> None:
        for place, block in enumerate(prefix.blocks):
            start = prefix.start + place * BLOCK
            self._reserve((prefix.slot, start, start + BLOCK))
            self._model.write_positions(prefix.slot, start, BLOCK, block)

    def save(self, slot: int, tokens: NDArray[np.int32], adapter: str | None, request: int) -> None:
        names = self._names(tokens, adapter)
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        for place, name in enumerate(names):
            if name in self._known:
                continue
            if not (self._folder / name).exists():
                if not self._model.has_positions(slot, place * BLOCK):
                    return  # some were given back: see BlockPool
                if not self._may_write(name, request):
                    for one in names[place:]:
                        self._had.setdefault(one, request)
                    return
                block = self._model.read_positions(slot, place * BLOCK, BLOCK)
                with self._lock:
                    if self._queued and sum(self._queued.values()) + block.nbytes > QUEUED:
                        return
                    self._queued[name] = block.nbytes
                self._writer.submit(self._write, name, block)
            self._known.add(name)

    def _may_write(self, name: str, request: int) -> bool:
        """True if another request had the block, or the allowance suffices."""
        if self._had.get(name, request) != request:
            return True
        if len(self._had) > _REMEMBERED:
            self._had.clear()
        size = self._model.bytes_of(BLOCK)
        if self._allowance.available < size:
            return False
        self._allowance.take(size)
        return True

    def close(self) -> None:
        """Write the queued blocks."""
        self._writer.shutdown()
        self._readers.shutdown()

    def _names(self, tokens: NDArray[np.int32], adapter: str | None) -> list[str]:
        """The names of the files of a text's whole blocks."""
        own = "" if adapter is None or self._adapters is None else self._adapters.digest(adapter)
        link, names = hashlib.sha256(self._root + own.encode()).digest(), []
        for place in range(len(tokens) // BLOCK):
            part = np.ascontiguousarray(tokens[place * BLOCK : (place + 1) * BLOCK], "<i4")
            link = hashlib.sha256(link + self._angle(place) + part.tobytes()).digest()
            names.append(link.hex())
        return names

    def _angle(self, place: int) -> bytes:
        """A digest of the rotary angles of a block."""
        for one in range(len(self._angles), place + 1):
            rows = self._table[one * BLOCK : (one + 1) * BLOCK]
            self._angles.append(hashlib.sha256(rows.tobytes()).digest())
        return self._angles[place]

    def _read(self, name: str) -> NDArray[np.uint8] | None:
        """The block in a file; None if it is incomplete."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                content = file.read(_DIGEST + self._model.bytes_of(BLOCK) + 1)
        except OSError:
            return None
        block = memoryview(content)[_DIGEST:]
        whole = len(block) == self._model.bytes_of(BLOCK)
        if not whole or _checksum(name, block) != content[:_DIGEST]:
            with contextlib.suppress(OSError):
                path.unlink()
            progress.note(f"{path}: damaged, and removed; its tokens are computed again")
            return None
        return np.frombuffer(block, np.uint8)

    def _write(self, name: str, block: NDArray[np.uint8]) -> None:
        """Write a file, unless the disk is full."""
        try:
            if block.nbytes > self._room:
                self._room = self._trim(block.nbytes)
            if block.nbytes <= self._room:
                make_folder(cache_dir())
                with contextlib.suppress(OSError):  # noted by the next line
                    self._folder.parent.mkdir(mode=0o700, exist_ok=True)
                with atomic_write(self._folder / name, block.nbytes) as file:
                    file.write(_checksum(name, block.data))
                    file.write(block.data)
                self._room -= block.nbytes
                user_cache.use(self._folder)
        except EnvironmentFault as error:
            progress.detail(f"a prefix is not stored: {error.message}")
        finally:
            with self._lock:
                self._queued.pop(name, None)

    def _trim(self, needed: int) -> int:
        """Remove the oldest prefixes beyond the limit; returns the bytes to write until the next
        check, since other processes write too."""
        if self._most is None:
            limit = user_cache.default_limit() if self._limit is None else self._limit
            self._most = limit // PART
        found = sorted(_files(self._folder.parent))
        used = sum(size for _, size, _ in found)
        if used + needed > self._most:
            for _, size, path in found:
                if used + needed <= _KEPT * self._most:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                    used -= size
        return min(self._most - used, max(needed, self._most // PART))


def _checksum(name: str, block: memoryview) -> bytes:
    whole = hashlib.sha256(name.encode())
    whole.update(block)
    return whole.digest()


def _files(folder: Path) -> Sequence[tuple[float, int, Path]]:
    """Time of the last use, size and path of all prefixes."""
    found = []
    for path in folder.glob("*/[!.]*"):
        with contextlib.suppress(OSError):  # another process has removed it
            state = path.stat()
            found.append((state.st_mtime, state.st_size, path))
    return found
