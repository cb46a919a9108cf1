"""MindSpore's strategy files: how each parameter is sharded over the ranks of a job.

For each parameter a file holds the device matrix that the ranks form and, for each axis of the
tensor, the axis of that matrix that shards it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.records import dataclass
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding import strategy_message
from lite_runner.weights.sharding.partition import Cut, cuts
from lite_runner.weights.sharding.strategy_message import HINT

MAX_BYTES = 64 * 2**20
MAX_RANKS = 1 << 16


@dataclass(frozen=True)
class Layout:
    """How a tensor is sharded over the ranks of one pipeline stage.

    The ranks fill `dev_matrix`, the last axis first. `tensor_map` has an entry for each axis of the
    tensor: the axes of the matrix, counted from the right, that shard it; (): not sharded.
    """

    dev_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    stage: int = 0

    @property
    def devices(self) -> int:
        return math.prod(self.dev_matrix)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many shards there are along each axis of the tensor."""
        return tuple(
            math.prod(self.dev_matrix[-1 - axis] for axis in axes) for axes in self.tensor_map
        )

    def bounds(self, shape: tuple[int, ...], rank: int) -> tuple[slice, ...]:
        """The shard of a full tensor of `shape` that a rank of the stage holds, as an index."""
        found = []
        for size, axes in zip(shape, self.tensor_map, strict=True):
            piece, parts = 0, 1
            for axis in axes:
                length = self.dev_matrix[-1 - axis]
                below = math.prod(self.dev_matrix[len(self.dev_matrix) - axis :])
                piece = piece * length + rank // below % length
                parts *= length
            found.append(slice(piece * size // parts, (piece + 1) * size // parts))
        return tuple(found)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` can be sharded so, in equal shards."""
        return len(shape) == len(self.parts) and all(
            size % parts == 0 for size, parts in zip(shape, self.parts, strict=True)
        )


@dataclass(frozen=True)
class Strategy:
    """The layouts of all parameters, and how many ranks there are."""

    layouts: Mapping[str, Layout]
    stages: int = 1

    @property
    def devices(self) -> int:
        """Ranks of a stage."""
        return next(iter(self.layouts.values())).devices

    @property
    def ranks(self) -> int:
        return self.stages * self.devices


def strategy_of(model: Decoder, ranks: Ranks, *, vocab_parallel: bool = True) -> Strategy:
    """How this project shards a model over `ranks`."""
    how = cuts(model, ranks.tensor, vocab_parallel=vocab_parallel)
    shapes = expected_tensors(model)
    return Strategy({name: _layout(cut, len(shapes[name]), ranks) for name, cut in how.items()})


def _layout(cut: Cut, axes: int, ranks: Ranks) -> Layout:
    cut_by: list[tuple[int, ...]] = [()] * axes
    if cut.axis is None:
        return Layout((ranks.data, ranks.tensor), tuple(cut_by))
    copies = ranks.tensor // cut.parts
    if copies == 1:
        cut_by[cut.axis] = (0,)
        return Layout((ranks.data, cut.parts), tuple(cut_by))
    cut_by[cut.axis] = (1,)  # neighbours with the same shard are an axis of their own
    return Layout((ranks.data, cut.parts, copies), tuple(cut_by))


def read_strategy(path: Path) -> Strategy:
    """The strategy in a file, or in the files of a folder, one per rank or per pipeline stage.

    Raises ArtifactError for invalid files, or stages that do not belong together.
    """
    files = _files(path)
    found: dict[str, Layout] = {}
    stages: set[int] = set()
    for file in {file.read_bytes(): file for file in files}.values():
        for name, layout in _layouts(strategy_message.read(file), file):
            # A parameter of two stages is read from the first.
            if name not in found or layout.stage < found[name].stage:
                found[name] = layout
            elif layout.stage == found[name].stage and layout != found[name]:
                raise ArtifactError(
                    f"{file}: {name} lies otherwise than another file of {path} says",
                    "keep the strategy files of one run in the folder",
                )
            stages.add(layout.stage)
    if stages != set(range(len(stages))):
        raise ArtifactError(
            f"{path}: holds the pipeline stages {sorted(stages)}, expected 0 to {max(stages)}", HINT
        )
    if len({layout.devices for layout in found.values()}) != 1:
        raise ArtifactError(f"{path}: the parameters do not lie on the same number of ranks", HINT)
    return Strategy(found, len(stages))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ArtifactError(f"{path}: no such strategy file or folder", HINT)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob("*.ckpt")) or sorted(path.glob("*.json"))
    if not files:
        raise ArtifactError(f"{path}: the folder holds no strategy file (*.ckpt, *.json)", HINT)
    for file in files:
        if file.stat().st_size > MAX_BYTES:
            raise ArtifactError(
                f"{file}: {file.stat().st_size:,} bytes, too many for a strategy file", HINT
            )
    return files


def _layouts(parsed: Any, file: Path) -> Iterator[tuple[str, Layout]]:
    """Each parameter and its layout; a name of a merged file starts with its stage."""
    for item in parsed.parallel_layout_item:
        merged = re.fullmatch(r"(\d{1,6})-(.+)", item.param_name)
        name = merged[2] if merged else item.param_name
        stage = int(merged[1]) if merged else _stage(parsed)
        held = item.parallel_layouts
        if strategy_message.shards_optimizer(held):
            raise ArtifactError(
                f"{file}: {name} is also cut for the optimizer (enable_parallel_optimizer), which "
                "is not available",
                "merge the checkpoint with mindspore.transform_checkpoints first",
            )
        matrix = tuple(held.dev_matrix[0].dim) if held.dev_matrix else ()
        axes = strategy_message.tensor_map(held)
        whole = tuple(tuple(axis for axis in some if axis != -1) for some in axes)
        named = [axis for some in whole for axis in some]
        if (
            not matrix
            or min(matrix) < 1
            or math.prod(matrix) > MAX_RANKS
            or len(set(named)) != len(named)
            or not all(0 <= axis < len(matrix) for axis in named)
        ):
            raise ArtifactError(
                f"{file}: {name} has the impossible layout {list(matrix)}, {axes}", HINT
            )
        yield name, Layout(matrix, whole, stage)


def _stage(content: Any) -> int:
    """That of the first operator, as MindSpore takes it."""
    stages = (item.parallel_strategys.stage for item in content.parallel_strategy_item)
    return next(stages, 0)


def write_strategy(path: Path, strategy: Strategy) -> None:
    """Write a strategy of one stage, as MindSpore and MindFormers read it."""
    content = strategy_message.new("ParallelStrategyMap", current_stage=0)
    # MindSpore takes the stage from the first operator, so there has to be one.
    operator = content.parallel_strategy_item.add(node_name="model")
    operator.parallel_strategys.stage = 0
    for name, layout in strategy.layouts.items():
        held = content.parallel_layout_item.add(param_name=name).parallel_layouts
        held.dev_matrix.add(dim=layout.dev_matrix)
        held.tensor_map.add(dim=[axes[0] if axes else -1 for axes in layout.tensor_map])
        held.param_split_shape.add()
        held.indices_offset.add()
        held.field = held.opt_weight_shard_step = held.opt_weight_shard_size = 0
    strategy_message.write(path, content)


def merge_strategies(folder: Path, out: Path) -> None:
    """Join the files of all pipeline stages in `folder`, as mindspore.merge_pipeline_strategys.

    Raises ArtifactError for files that are no strategies or do not belong together.
    """
    read_strategy(folder)  # says what is wrong with any of them
    joined = strategy_message.new("ParallelStrategyMap", current_stage=1)
    seen: set[int] = set()
    for file in _files(folder):
        if file.resolve() == out.resolve():
            continue
        content = strategy_message.read(file)
        stage = _stage(content)
        if stage in seen:
            continue
        seen.add(stage)
        for item in content.parallel_layout_item:
            item.param_name = f"{stage}-{item.param_name}"
        joined.parallel_strategy_item.extend(content.parallel_strategy_item)
        joined.parallel_layout_item.extend(content.parallel_layout_item)
    strategy_message.write(out, joined)
