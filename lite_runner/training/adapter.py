"""The trained adapter: its target modules, initial values and folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.records import dataclass
from lite_runner.training.kernels import Array
from lite_runner.training.network import Delta
from lite_runner.training.options import LoraOptions
from lite_runner.weights import LazyTensor
from lite_runner.weights.lora.adapter import HEAD, Adapter, LoraPair, TargetModule, by_module
from lite_runner.weights.lora.adapter_config import lora_settings
from lite_runner.weights.lora.adapter_reader import adapter_folders, open_adapters

NAME = "finetune"
_MERGE = "merge it into the model (run_mode=convert merge=true), and train a new adapter of that"


@dataclass(frozen=True)
class TrainedLora:
    """The trained arrays by name, and the weights that they update."""

    arrays: Mapping[str, Array]
    deltas: Mapping[str, Delta]

    def adapter(self) -> Adapter:
        """The current adapter, for writing."""
        pairs = {
            weight: LoraPair(
                in_memory(self.arrays[one.a]), in_memory(self.arrays[one.b]), one.scale
            )
            for weight, one in self.deltas.items()
        }
        return Adapter(NAME, Path(), pairs)


def in_memory(array: Array) -> LazyTensor:
    return LazyTensor(array.shape, "F32", lambda: array)


def new_lora(model: Decoder, options: LoraOptions, seed: int) -> TrainedLora:
    """A new adapter: A as PEFT draws it, B zeros. Raises ArtifactError, which names the modules
    that there are, and ConfigError for some that are not trained."""
    chosen = _chosen(model, options.targets)
    rank = options.r
    scale = options.alpha / (rank**0.5 if options.rslora else rank)
    arrays: dict[str, Array] = {}
    deltas: dict[str, Delta] = {}
    generator = np.random.default_rng(seed)
    for module, places in chosen.items():
        a = f"{module}.lora_A"
        bound = places[0].width_in ** -0.5
        drawn = generator.uniform(-bound, bound, (rank, places[0].width_in))
        arrays[a] = drawn.astype(np.float32)
        for place in places:
            b = f"{place.weight}.lora_B"
            arrays[b] = np.zeros((place.width_out, rank), np.float32)
            deltas[place.weight] = Delta(a, b, scale)
    return TrainedLora(arrays, deltas)


def opened_lora(model: Decoder, folder: Path) -> TrainedLora:
    """The adapter of a PEFT folder, to be trained further. Raises ArtifactError, and ConfigError
    for a list of several."""
    listed = adapter_folders(folder, key="finetune.init_adapter")
    if len(listed) > 1:
        raise ConfigError(
            f"finetune.init_adapter: {folder} lists {len(listed)} adapters, expected one",
            f"finetune.init_adapter={next(iter(listed.values()))}",
        )
    (adapter,) = open_adapters(folder, model).values()
    return lora_of(adapter, model)


def lora_of(adapter: Adapter, model: Decoder) -> TrainedLora:
    """The arrays of an adapter. Raises ConfigError for modules that cannot be trained."""
    arrays: dict[str, Array] = {}
    deltas: dict[str, Delta] = {}
    for module, places in by_module(model, hugging_face=True).items():
        held = [place for place in places if place.weight in adapter.pairs]
        if not held:
            continue
        _check(module, places, held, adapter)
        a = f"{module}.lora_A"
        for place in held:
            pair = adapter.pairs[place.weight]
            b = f"{place.weight}.lora_B"
            own = pair.a.float32()
            if not np.array_equal(arrays.setdefault(a, own.copy()), own, equal_nan=True):
                raise ConfigError(
                    f"{adapter.folder}: {module}: its parts have different A's; one A for all parts"
                    " can be trained",
                    _MERGE,
                )
            arrays[b] = pair.b.float32().copy()
            deltas[place.weight] = Delta(a, b, pair.scale)
    return TrainedLora(arrays, deltas)


def _chosen(model: Decoder, targets: str | Sequence[str] | None) -> dict[str, list[TargetModule]]:
    """The target modules by their Hugging Face names. The names are MindFormers' if these are not
    known and those are."""
    modules = by_module(model, hugging_face=True)
    if targets is None:
        wanted = {
            place.weight
            for places in modules.values()
            for place in places
            if place.fused is not None and place.fused.role in ("query", "value")
        }
        if not wanted:
            raise ConfigError(
                f"finetune.lora.targets: {model.architecture} has no modules of query and value"
                " that adapters may target",
                "finetune.lora.targets=[o_proj]",
            )
    else:
        if isinstance(targets, str) and targets.replace("_", "").isalnum():  # a name
            targets = (targets,)
        settings = lora_settings(Path("finetune.lora.targets"), 1, 1, targets)
        theirs = by_module(model, hugging_face=False)
        own = targets == "all-linear" or _matched(modules, targets)
        names = modules if own or not _matched(theirs, targets) else theirs
        found = settings.targets(names, HEAD)
        wanted = {place.weight for name in found for place in names[name]}
        if targets == "all-linear":  # as in PEFT: embeddings and experts are not linear layers
            wanted -= {
                place.weight for places in names.values() for place in places if _fixed(place)
            }
    chosen = {}
    for module, places in modules.items():
        held = [place for place in places if place.weight in wanted]
        if not held:
            continue
        if targets is not None:
            _check(module, places, held)
        chosen[module] = places  # one A for all parts of a fused module
    return chosen


def _matched(modules: Mapping[str, object], targets: str | Sequence[str]) -> bool:
    """True if one of the names matches a module."""
    if isinstance(targets, str):
        try:
            return any(re.fullmatch(targets, name) for name in modules)
        except re.error:
            return True  # reported when it is read
    return any(name == one or name.endswith(f".{one}") for one in targets for name in modules)


def _fixed(place: TargetModule) -> str:
    """The reason why LoRA cannot train a module; "": it can."""
    role = None if place.fused is None else place.fused.role
    if place.is_embedding or role in (None, "head"):
        return "the embedding and the head are"
    return "experts are" if role in ("expert_gate", "expert_up", "expert_down") else ""


def _check(
    module: str,
    places: Sequence[TargetModule],
    held: Sequence[TargetModule],
    adapter: Adapter | None = None,
) -> None:
    """Raise ConfigError for a module of finetune.lora.targets, or of an `adapter`, that cannot be
    trained, or is named only in part."""
    where = "finetune.lora.targets" if adapter is None else str(adapter.folder)
    if what := _fixed(held[0]):
        raise ConfigError(
            f"{where}: {module}: {what} not trained as LoRA",
            "choose modules of attention and feed-forward, or finetune.full=true"
            if adapter is None
            else _MERGE,
        )
    if len(held) < len(places):
        raise ConfigError(
            f"{where}: {module} of Hugging Face is {len(places)} modules of MindFormers, of which"
            f" {len(held)} are named; an adapter for PEFT has all of them",
            f"finetune.lora.targets=[{module.rpartition('.')[2]}]" if adapter is None else _MERGE,
        )
