"""A sharded checkpoint: which rank holds which shard, and its tensors reassembled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.system.files import sha256_of
from lite_runner.weights.memory_map import drop_pages
from lite_runner.weights.sharding.shard_manifest import (
    ShardManifest,
)
from lite_runner.weights.sharding.strategy import Layout, Strategy
from lite_runner.weights.tensor import Index, LazyTensor

HASH_THREADS = 4
COPY_AGAIN = "copy the whole set again, or cut the checkpoint again (run_mode=shard)"


@dataclass(frozen=True)
class ShardSet:
    """A complete sharded checkpoint whose shapes are validated."""

    folder: Path
    files: tuple[Path, ...]  # of each rank
    held: tuple[Mapping[str, LazyTensor], ...]  # of each rank, in the model's names
    strategy: Strategy
    shapes: Mapping[str, tuple[int, ...]]  # of the full tensors
    manifests: tuple[ShardManifest, ...]  # none, or one a rank
    layout_source: str  # where the layout is from

    def whole(self) -> dict[str, LazyTensor]:
        """Every tensor of the model, assembled from its shards when it is read."""
        return {name: _assembled(self.shapes[name], self._pieces(name)) for name in self.shapes}

    def rank_with(self, target: Strategy, rank: int) -> int | None:
        """The rank that holds exactly the shards of `rank` in `target`; None if there is none."""
        if self.strategy.stages > 1:
            return None
        for own in range(len(self.files)):
            if all(
                self.strategy.layouts[name].bounds(shape, own)
                == target.layouts[name].bounds(shape, rank)
                for name, shape in self.shapes.items()
            ):
                return own
        return None

    def needed_for(self, target: Strategy, rank: int) -> set[int]:
        """The ranks whose shards overlap those of `rank` in `target`."""
        return {
            own
            for name, shape in self.shapes.items()
            for bounds, own in self._owners(name)
            if _overlap(bounds, target.layouts[name].bounds(shape, rank)) is not None
        }

    def verify(self, ranks: Iterable[int]) -> None:
        """Verify the shards of `ranks` against their manifests. Raises ArtifactError."""
        if not self.manifests:
            return
        some = sorted(ranks)
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="sha256") as pool:
            for rank, found in zip(
                some, pool.map(lambda rank: sha256_of(self.files[rank]), some), strict=True
            ):
                expected = self.manifests[rank].sha256
                if found != expected:
                    raise ArtifactError(
                        f"{self.files[rank]}: another file than the one that was written: sha256 "
                        f"{found[:16]}..., the manifest says {expected[:16]}...",
                        COPY_AGAIN,
                    )

    def describe(self) -> str:
        """The layout in short: tp=2 dp=1."""
        shapes = self.shapes.items()
        # The most shards of any tensor: there are fewer where ranks share key/value heads.
        tensor = max(
            (len({str(layout.bounds(shape, rank)) for rank in range(layout.devices)}))
            for (_, shape), layout in zip(shapes, map(self._layout, self.shapes), strict=True)
        )
        stages = f" pp={self.strategy.stages}" if self.strategy.stages > 1 else ""
        return f"tp={tensor} dp={self.strategy.devices // tensor}{stages}"

    def _layout(self, name: str) -> Layout:
        return self.strategy.layouts[name]

    def _owners(self, name: str) -> Iterator[tuple[Index, int]]:
        """Each distinct shard of a tensor, and the first rank that holds it."""
        layout, shape = self._layout(name), self.shapes[name]
        seen = set()
        for rank in range(layout.devices):
            bounds = layout.bounds(shape, rank)
            if (key := str(bounds)) not in seen:
                seen.add(key)
                yield bounds, layout.stage * layout.devices + rank

    def _pieces(self, name: str) -> list[tuple[Index, LazyTensor]]:
        return [(bounds, self.held[rank][name]) for bounds, rank in self._owners(name)]


def _overlap(one: Index, other: Index) -> Index | None:
    common = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(part.start >= part.stop for part in common) else common


def _assembled(shape: tuple[int, ...], pieces: list[tuple[Index, LazyTensor]]) -> LazyTensor:
    """The full tensor of `shape`; a slice of it reads only the shards that it overlaps."""
    if len(pieces) == 1:
        return pieces[0][1]

    def part(index: Index) -> NDArray[Any]:
        full = (*index, *(slice(None),) * (len(shape) - len(index)))
        wanted = tuple(slice(*one.indices(size)[:2]) for one, size in zip(full, shape, strict=True))
        out: NDArray[Any] | None = None
        for bounds, tensor in pieces:
            common = _overlap(bounds, wanted)
            if common is None:
                continue
            values = tensor.piece(_relative(common, bounds))
            if common == wanted:
                return values
            if out is None:
                out = np.empty([one.stop - one.start for one in wanted], values.dtype)
            out[_relative(common, wanted)] = values
            drop_pages(values)
        assert out is not None
        return out

    return LazyTensor(shape, pieces[0][1].dtype, lambda: part(()), part)


def _relative(index: Index, to: Index) -> Index:
    return tuple(
        slice(one.start - base.start, one.stop - base.start)
        for one, base in zip(index, to, strict=True)
    )
