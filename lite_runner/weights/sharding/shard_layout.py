"""The layout of a sharded checkpoint, from its manifests, a strategy file, or tensor shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lite_runner.architectures.spec import Decoder
from lite_runner.config.ranks import Ranks
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats.mindformers import canonical_name
from lite_runner.weights.layouts import expected_tensors
from lite_runner.weights.sharding.shard_manifest import ShardManifest
from lite_runner.weights.sharding.strategy import Layout, Strategy, read_strategy, strategy_of
from lite_runner.weights.tensor import LazyTensor

MOST_PARTS = 128  # tensor-parallel degrees that are tried to match shapes


def find_layouts(
    folder: Path,
    model: Decoder,
    held: tuple[Mapping[str, LazyTensor], ...],
    manifests: tuple[ShardManifest, ...],
    path: Path | None,
) -> tuple[Strategy, str]:
    """The layouts of the tensors, and where they are from."""
    own = None
    if manifests:
        first = manifests[0]
        own = strategy_of(model, first.ranks, vocab_parallel=first.vocab_parallel)
        if path is None:
            return own, "the manifest"
    if path is None:
        return _from_shapes(folder, model, held), "the shapes"
    given = _of_model(_given(folder, held, path), expected_tensors(model), path)
    if own is not None:
        for name, shape in expected_tensors(model).items():
            for rank in range(given.devices):
                if given.layouts[name].bounds(shape, rank) != own.layouts[name].bounds(shape, rank):
                    raise ArtifactError(
                        f"{path}: not the strategy of {folder}: its manifest cuts {name} otherwise",
                        "leave out src_strategy_path_or_dir: the set has manifests",
                    )
    return given, f"the strategy {path}"


def _given(folder: Path, held: tuple[Mapping[str, LazyTensor], ...], path: Path | None) -> Strategy:
    """The strategy in `path`, validated to have as many ranks; one rank needs none."""
    if path is None and len(held) == 1:
        return Strategy({name: unsharded(tensor) for name, tensor in held[0].items()})
    hint = "give the strategy that the checkpoint was written with"
    if path is None:
        raise ArtifactError(f"{folder}: nothing says how its {len(held)} ranks are cut", hint)
    given = read_strategy(path)
    if given.ranks != len(held):
        raise ArtifactError(
            f"{folder}: {len(held)} ranks, but the strategy {path} is of {given.ranks}", hint
        )
    return Strategy(
        {canonical_name(name): one for name, one in given.layouts.items()}, given.stages
    )


def unsharded(tensor: LazyTensor) -> Layout:
    """The layout of a replicated tensor on one rank."""
    return Layout((1,), ((),) * len(tensor.shape))


def strategy_in_file(
    folder: Path, held: tuple[Mapping[str, LazyTensor], ...], path: Path | None
) -> tuple[Strategy, dict[str, tuple[int, ...]]]:
    """The strategy in `path` of an unknown model's shards, and the shapes of the full tensors."""
    given = _given(folder, held, path)
    shapes = {}
    for name, layout in given.layouts.items():
        tensor = held[layout.stage * layout.devices].get(name)
        if tensor is not None:  # a network may have parameters that are not saved
            pairs = zip(tensor.shape, layout.parts, strict=False)
            shapes[name] = tuple(size * parts for size, parts in pairs)
    if not shapes:
        raise ArtifactError(f"{path}: the strategy of another model: it has none of its tensors")
    return _of_model(given, shapes, path or folder), shapes


def _of_model(strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], path: Path) -> Strategy:
    """The layouts of the model's tensors. Raises ArtifactError."""
    layouts = strategy.layouts
    missing = [name for name in shapes if name not in layouts]
    if missing:
        raise ArtifactError(
            f"{path}: the strategy of another model: it lacks {len(missing)} of {len(shapes)} "
            f"parameters: {', '.join(missing[:5])}",
            "check that model= and src_strategy_path_or_dir= belong together",
        )
    for name, shape in shapes.items():
        if not layouts[name].fits(shape):
            raise ArtifactError(
                f"{path}: the strategy of another model: {name} {list(shape)} cannot be cut by "
                f"{layouts[name].dev_matrix}, {layouts[name].tensor_map}",
                "check that model= and src_strategy_path_or_dir= belong together",
            )
    return Strategy({name: layouts[name] for name in shapes}, strategy.stages)


def _from_shapes(
    folder: Path, model: Decoder, held: tuple[Mapping[str, LazyTensor], ...]
) -> Strategy:
    """The layout of ours that gives the shapes of rank 0."""
    shapes = expected_tensors(model)
    found = {name: tensor.shape for name, tensor in held[0].items()}
    for tensor in range(1, MOST_PARTS + 1):
        for vocab_parallel in (True, False):
            tried = strategy_of(model, Ranks(tensor=tensor), vocab_parallel=vocab_parallel)
            if found != shard_shapes(tried, shapes, 0):
                continue
            if len(held) % tensor:
                raise ArtifactError(
                    f"{folder}: {len(held)} ranks, but their shapes are those of tp={tensor}: "
                    "ranks are missing, or too many",
                    "copy the whole set again, or cut the checkpoint again (run_mode=shard)",
                )
            ranks = Ranks(data=len(held) // tensor, tensor=tensor)
            return strategy_of(model, ranks, vocab_parallel=vocab_parallel)
    raise ArtifactError(
        f"{folder}: the shapes of its {len(held)} ranks are no cut of the model that is known here",
        "check that model= and load_checkpoint= belong together; for another cut give "
        "src_strategy_path_or_dir=",
    )


def shard_shapes(
    strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], rank: int
) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a rank's shards of tensors of `shapes`; None if they are not divisible so."""
    stage, local = divmod(rank, strategy.devices)
    found = {}
    for name, shape in shapes.items():
        layout = strategy.layouts[name]
        if not layout.fits(shape):
            return None
        if layout.stage == stage:
            found[name] = tuple(part.stop - part.start for part in layout.bounds(shape, local))
    return found
