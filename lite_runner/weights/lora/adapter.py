"""LoRA adapters of a model, opened but not loaded, the modules that they target, and merging.

An adapter adds scale * B (A x) to the output of a weight W for the input x. A module that fuses q,
k and v, as in Hugging Face's gpt2 and bloom, becomes three of ours, which share A.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import Parameter, can_untie_head, parameters
from lite_runner.architectures.naming import HEAD as HEAD
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.records import dataclass
from lite_runner.weights import LazyTensor, drop_pages, narrowed, same_values, widened

LINEAR = ("query", "key", "value", "attention_out", "gate", "up", "down")  # roles
_HEAD_WEIGHT = f"{HEAD}.weight"


@dataclass(frozen=True)
class LoraPair:
    """The update of one weight: scale * b @ a, as [out, in] whatever the weight's own layout.

    An embedding takes tokens in and gives hidden states out.
    """

    a: LazyTensor  # [r, in]
    b: LazyTensor  # [out, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def values(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [r, in] and scale * B [out, r]; nothing else stays in memory."""
        a, b = self.a.read(), self.b.read()
        found = widened(a).copy(), widened(b) * np.float32(self.scale)
        for stored in (a, b):
            drop_pages(stored)
        return found


@dataclass(frozen=True)
class Adapter:
    """One adapter; `pairs` by the canonical name of the base weight, in the model's order.

    A tied head has the name of one of its own, lm_head.weight; an adapter of the embedding leaves
    it alone, and so the other way round, as in PEFT.
    """

    name: str
    folder: Path
    pairs: Mapping[str, LoraPair]
    copies: Mapping[str, LazyTensor] = field(default_factory=dict)  # of base weights, by name
    may_be_zero: bool = False  # of a network whose weights are loaded later

    @property
    def bfloat16(self) -> bool:
        """True if A and scale * B fit bfloat16 without loss."""
        return all(
            pair.a.dtype == pair.b.dtype == "BF16" and abs(math.frexp(pair.scale)[0]) == 0.5
            for pair in self.pairs.values()
        )

    def digest(self, more: str) -> str:
        """SHA-256 of all values, and of `more`."""
        whole = hashlib.sha256(more.encode())
        for name, pair in sorted(self.pairs.items()):
            whole.update(f"{name} {pair.a.shape} {pair.b.shape}".encode())
            for values in pair.values():
                whole.update(np.ascontiguousarray(values).data)
        return whole.hexdigest()

    def padded(
        self, name: str, rank: int, inputs: int, outputs: int, before: tuple[int, int] = (0, 0)
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """A [rank, inputs] and scale * B [outputs, rank] of a weight, filled up with zeros, of
        inputs and outputs as many `before`; only zeros where the adapter leaves it alone."""
        a = np.zeros((rank, inputs), np.float32)
        b = np.zeros((outputs, rank), np.float32)
        if (pair := self.pairs.get(name)) is not None:
            own_a, own_b = pair.values()
            a[: pair.rank, before[0] : before[0] + own_a.shape[1]] = own_a
            b[before[1] : before[1] + own_b.shape[0], : pair.rank] = own_b
        return a, b

    def check_effective(self) -> None:
        """Raise ArtifactError if all products B A are zero; reads values until one is not."""
        if self.may_be_zero:
            return
        for pair in self.pairs.values():
            if all(values.any() for values in pair.values()):
                return
        raise ArtifactError(
            f"adapter {self.name}: {self.folder}: has no effect: the products of all "
            f"{len(self.pairs)} pairs of A and B are zero",
            "adapters are initialized so; this one was saved before training",
        )

    def check_copies(self, base: Mapping[str, LazyTensor]) -> None:
        """Raise ArtifactError if the embedding or head saved with the adapter differs from that of
        `base`, which peft would replace with it."""
        for name, copy in self.copies.items():
            if not same_values(copy, base[name]):
                raise ArtifactError(
                    f"adapter {self.name}: {self.folder}: holds a whole {name} that is not the "
                    "base's; only plain LoRA is supported",
                    "load the base that the adapter was trained on",
                )


@dataclass(frozen=True)
class LoraSize:
    """Adapter slots of a model, and the adapters that fit them."""

    slots: int  # P, adapters in memory at a time
    rank: int  # R, maximum rank
    targets: frozenset[str]  # canonical names of the weights that adapters may target
    bfloat16: bool = False  # storage type in the native kernels' pools
    rounded: bool = False  # adapters are rounded to bfloat16 even with a loss

    def check(self, adapter: Adapter) -> None:
        """Raise ConfigError if the adapter does not fit a slot."""
        errors, hint = [], "load the model again: the slots are sized by the adapters given then"
        hint += ", or by serve.max_lora_rank="
        rank = max((pair.rank for pair in adapter.pairs.values()), default=0)
        if rank > self.rank:
            errors.append(f"got rank {rank}, expected at most {self.rank}")
        if others := adapter.pairs.keys() - self.targets:
            errors.append(
                f"got {len(others)} weights that the slots do not target, such as {min(others)}"
            )
        if self.bfloat16 and not (self.rounded or adapter.bfloat16):
            errors.append("got values that bfloat16 does not hold exactly, as the others' are")
            hint += "; adapter_dtype=bf16 rounds all adapters"
        if errors:
            raise ConfigError(
                f"adapter {adapter.name}: {adapter.folder}: does not fit the adapter slots of the"
                f" loaded model: {'; '.join(errors)}",
                hint,
            )


def pool_size(
    adapters: Sequence[Adapter],
    slots: int,
    *,
    rounded: bool = False,
    later_rank: int = 0,
    later_targets: Collection[str] = (),
) -> LoraSize:
    """Size of the pools for `adapters`, `slots` of them at a time; `rounded`: to bfloat16;
    `later_rank` and `later_targets`: of others that come later, if it is not 0."""
    pairs = [item for adapter in adapters for item in adapter.pairs.items()]
    rank = max([later_rank, *(pair.rank for _, pair in pairs)])
    targets = frozenset([*later_targets, *(name for name, _ in pairs)])
    exact = not later_rank and all(adapter.bfloat16 for adapter in adapters)
    return LoraSize(slots, rank, targets, rounded or exact, rounded)


@dataclass(frozen=True)
class TargetModule:
    """A canonical weight that A [r, width_in] and B [width_out, r] target."""

    weight: str  # canonical name
    width_in: int  # for an embedding: the vocabulary
    width_out: int
    mindformers: str  # name of the module
    hugging_face: str
    fused: Parameter | None = None  # set if the stored tensor reorders its rows
    is_embedding: bool = False
    transposed: bool = False  # the weight is [in, out], else [out, in]


def sites(config: Decoder) -> tuple[TargetModule, ...]:
    """Every target module in layer order, a tied head included."""
    found = []
    table = parameters(config)
    for parameter in table:
        is_embedding = parameter is table[0]
        is_head = parameter.role == "head" and parameter.kind == "weight"  # may have a bias
        if not parameter.is_linear and not is_embedding and not is_head:
            continue
        transposed = is_embedding or parameter.transposed
        width_in, width_out = parameter.shape if transposed else parameter.shape[::-1]
        found.append(
            TargetModule(
                parameter.name,
                width_in,
                width_out,
                (parameter.stored or parameter.name).rpartition(".")[0],
                parameter.hugging_face.rpartition(".")[0],
                parameter,
                is_embedding,
                transposed,
            )
        )
    if config.tie_word_embeddings:
        found.append(
            TargetModule(f"{HEAD}.weight", config.hidden_size, config.vocab_size, HEAD, HEAD)
        )
    return tuple(found)


def linear_sites(config: Decoder) -> list[TargetModule]:
    """The linear layers of attention and feed-forward, without experts."""
    return [site for site in sites(config) if site.fused is not None and site.fused.role in LINEAR]


def by_module(config: Decoder, *, hugging_face: bool) -> dict[str, list[TargetModule]]:
    """Module name -> its weights: one, or three if fused."""
    found: defaultdict[str, list[TargetModule]] = defaultdict(list)
    for site in sites(config):
        if hugging_face:
            found[site.hugging_face].append(site)
        elif site.fused is None or site.fused.stored:
            found[site.mindformers].append(site)
        else:
            found[site.mindformers].append(replace(site, fused=None))
    return dict(found)


def merged_model(model: Decoder, adapter: Adapter) -> Decoder:
    """The model of the merged tensors.

    A tied head becomes untied if the adapter changes either the head or the embedding.
    Raises ArtifactError for bloom and gpt2, whose networks have no such head.
    """
    embedding = parameters(model)[0].name
    if not model.tie_word_embeddings or not {embedding, _HEAD_WEIGHT} & adapter.pairs.keys():
        return model
    if not can_untie_head(model):
        raise ArtifactError(
            f"adapter {adapter.name}: changes the embedding or the head alone, and"
            f" {model.architecture} has one tensor for both, so it cannot be merged",
            "run it beside its base: run_mode=slora",
        )
    return replace(model, tie_word_embeddings=False)


def merged(
    tensors: Mapping[str, LazyTensor], adapter: Adapter, model: Decoder
) -> dict[str, LazyTensor]:
    """The tensors of `merged_model`, from all of the base `model`'s; each keeps its type.

    The sum is computed in float32 and rounded once. Raises ArtifactError if the adapter is of
    another base or changes nothing; reading does if a sum is not finite in the type.
    """
    adapter.check_effective()
    adapter.check_copies(tensors)
    result = dict(tensors)
    if model.tie_word_embeddings and not merged_model(model, adapter).tie_word_embeddings:
        result[_HEAD_WEIGHT] = tensors[parameters(model)[0].name]
    for site in sites(model):
        if site.weight in adapter.pairs:
            pair, base = adapter.pairs[site.weight], result[site.weight]
            read = partial(_sum, base, pair, site, adapter.name)
            result[site.weight] = LazyTensor(base.shape, base.dtype, read)
    return result


def _sum(base: LazyTensor, pair: LoraPair, site: TargetModule, name: str) -> NDArray[Any]:
    a, b = pair.values()
    with np.errstate(over="ignore", invalid="ignore"):
        total = a.T @ b.T if site.transposed else b @ a
        total += base.float32()
        stored = narrowed(total, base.dtype)
    if not np.isfinite(total).all() or not np.isfinite(widened(stored)).all():
        raise ArtifactError(
            f"adapter {name}: {site.weight} merged with it has values that are not numbers, or too "
            f"large for {base.dtype}",
            "the adapter's weights are damaged, or it was trained on another base",
        )
    return stored
