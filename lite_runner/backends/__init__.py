"""Backends compute logits for rows of tokens: their protocol, and how much one step takes; and the
seat of each folder here: what it cannot run, how much memory it needs, how it is opened."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures.positions import prefix_error
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder, Prefix
from lite_runner.config.generation import GenerationConfig
from lite_runner.config.schema import BACKENDS
from lite_runner.config.sections import ComputeSettings, Ranks
from lite_runner.model import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing import Memory
from lite_runner.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lite_runner.backends.adapter_slots import AdapterSlots
    from lite_runner.backends.block_pool import BlockPool, Part
    from lite_runner.model.adapters import AdapterJob
    from lite_runner.weights.lora.adapter import Adapter, LoraSize

# Set before MindSpore is imported: log errors only, unless the user asks for more.
os.environ.setdefault("GLOG_v", "3")

BASE = -1  # adapter slot of the base model


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The work of one cache slot in a step."""

    slot: int
    tokens: NDArray[np.int32]  # [n], n >= 1: a prompt, a prompt chunk, or one new token
    position: int  # position id of the first token; cached tokens from here on are overwritten
    adapter_slot: int = BASE
    logits: int = 1  # number of last tokens to return logits for, 0 to n
    length: int = 0  # length of the whole prompt if this is a chunk of it; else 0
    hidden: bool = False  # return hidden states instead of logits: see GivesHidden
    # Tokens behind the first with logits may be taken back: recurrent states are kept there.
    drafts: bool = False

    @property
    def end(self) -> int:
        """Sequence length for dynamic RoPE scaling: for a chunk the prompt's."""
        return max(self.length, self.position + len(self.tokens))

    @property
    def part(self) -> Part:
        """The slot, and where the row's tokens begin and end in it."""
        return self.slot, self.position, self.position + len(self.tokens)


@dataclass(frozen=True)
class BackendInfo:
    """A backend's sizes and capabilities."""

    engine: str  # name of the engine in result.json
    vocab_size: int
    slots: int  # cache slots
    max_length: int  # tokens per slot, prompt and generated
    budget: int  # preferred maximum of tokens per step
    # Prompts are chunked at multiples of it. 1: anywhere, since logits are batch-invariant: a row's
    # are bit-identical however it is chunked and whatever else is in the batch.
    chunk: int
    hidden_size: int = 0  # size of hidden states, of a backend that returns them: see GivesHidden
    most_logits: int = 0  # maximum logits per step after tokens other than a row's last
    can_copy: bool = True  # slots can be copied
    # Prefix caching: cached keys depend on the prefix only, not on the sequence length (but for
    # short_length), so that any sequence with that prefix can continue from it.
    can_continue: bool = True
    # Longrope: longer texts have other keys. A text that grows beyond it is prefilled again, and
    # keys are reused only between texts on the same side of it.
    short_length: int | None = None
    # Of models with recurrent states, or windows: the longest prefix of at most so many tokens of a
    # slot that has a state to go on from, or keys. None: any prefix has.
    usable: Callable[[int, int], int] | None = None
    prefix: Prefix | None = None  # required in prompts, which are computed as a whole
    memory: BlockPool | None = None  # of the cache: see Paged; None: slots have their own
    windows: BlockPool | None = None  # of layers with windows; there is enough for all slots

    def prompt_error(self, prompt: NDArray[np.int32]) -> str | None:
        """The validation error of a prompt without the prefix that the model needs, or None."""
        return None if self.prefix is None else prefix_error(self.prefix, prompt.tolist())

    @property
    def exact(self) -> bool:
        """True if logits are batch-invariant (bit-identical in any batch)."""
        return self.chunk == 1


def check_rows(rows: Sequence[Row], info: BackendInfo, adapter_slots: int = 0) -> None:
    """Raise ValueError for a row beyond the backend's sizes: computing it would read or write out
    of bounds."""
    seen = set()
    for row in rows:
        count = len(row.tokens)
        if not 0 <= row.slot < info.slots or row.slot in seen:
            expected = f"0 to {info.slots - 1}, each at most once"
            raise ValueError(f"slot: got {row.slot}, expected {expected}")
        seen.add(row.slot)
        if not count or row.position < 0 or row.position + count > info.max_length:
            last = row.position + count - 1
            expected = f"at least one, within 0 to {info.max_length - 1}"
            raise ValueError(f"positions: got {row.position} to {last}, expected {expected}")
        if not 0 <= row.logits <= count:
            raise ValueError(f"logits: got {row.logits}, expected 0 to {count}")
        low, high = int(row.tokens[0]), int(row.tokens[0])
        if count > 1:
            low, high = int(row.tokens.min()), int(row.tokens.max())
        if low < 0 or high >= info.vocab_size:
            expected = f"0 to {info.vocab_size - 1}"
            raise ValueError(f"token ids: got {low} to {high}, expected {expected}")
        if not BASE <= row.adapter_slot < adapter_slots:
            expected = f"{BASE} to {adapter_slots - 1}"
            raise ValueError(f"adapter_slot: got {row.adapter_slot}, expected {expected}")


@dataclasses.dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Blocks of tokens in the cache, read from files."""

    slot: int  # for which they were read
    start: int  # of their tokens in the text
    end: int
    blocks: Sequence[NDArray[np.uint8]]


class StoredPrefixes(Protocol):
    """Prefixes of prompts on disk, bit-identical to computed ones."""

    def find(
        self, slot: int, tokens: NDArray[np.int32], adapter: str | None, start: int, cached: int
    ) -> StoredPrefix | None:
        """The longest stored prefix of a text, for a slot with its first `start` tokens, if reading
        it beats the `cached` tokens that some slot has."""
        ...

    def restore(self, prefix: StoredPrefix) -> None:
        """Write it to its slot."""
        ...

    def save(self, slot: int, tokens: NDArray[np.int32], adapter: str | None, request: int) -> None:
        """Store a slot's cache of these tokens, from position 0, in the background; `request`: id
        of the request that computed them."""
        ...


class Backend(Protocol):
    """Computes rows over cache slots. A row's logits do not depend on other rows; see `exact`."""

    @property
    def info(self) -> BackendInfo: ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """None: base model only."""
        ...

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling so far, in any call."""
        ...

    def prepare(self) -> None:
        """Compile ahead of the first token; else `forward` does it."""
        ...

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab_size], in the order of rows and tokens.

        A slot occurs at most once. A row may ask for more than one row of logits only if the
        backend has `most_logits`, which bounds their total.
        """
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slot sources[i] to targets[i]; all are read before any is written."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


# The new tokens of a step, each with its row; its seconds; logits [rows, vocab], if they are kept.
OnStep = Callable[[list[tuple[int, int]], float, NDArray[np.float32] | None], None]


@runtime_checkable
class Completer(Protocol):
    """Completes prompts, and scores texts, by a loop of its own: it computes no rows of a
    scheduler."""

    @property
    def engine(self) -> str:
        """Name of the engine in result.json."""
        ...

    @property
    def slots(self) -> int:
        """Most prompts that are completed together."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the longest text, prompt and generated."""
        ...

    def warm_up(self) -> float:
        """Compile ahead of the first prompt, where that can be done; its seconds."""
        ...

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        options: GenerationConfig,
        seed: int,
        on_step: OnStep,
        *,
        keep_logits: bool = False,
    ) -> list[int] | None:
        """Complete up to `slots` prompts, each by at most so many tokens of `limits`. Beam search
        has no steps: it returns the tokens of the best beam, an end token included."""
        ...

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-likelihood of each of ids[1:] given those before it."""
        ...

    def close(self) -> None:
        """Release all resources; idempotent."""
        ...


@runtime_checkable
class GivesHidden(Backend, Protocol):
    """A backend that can return hidden states."""

    def hidden(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """As `forward`, but the hidden states [sum of row.logits, hidden_size] after the final
        norm in place of logits, of which there may be any number."""
        ...


@runtime_checkable
class Growing(Backend, Protocol):
    """A backend whose cache can be reallocated while its weights stay."""

    def grow(self, slots: int, length: int, cache_bytes: int | None = None) -> None:
        """Reallocate the cache for `slots` rows of `length` tokens; its contents are lost.
        `cache_bytes`: see RunOptions."""
        ...


@runtime_checkable
class Paged(Backend, Protocol):
    """A backend whose slots share the blocks of BackendInfo.memory: `copy` copies none of them, and
    `forward` and `hidden` take those that rows need."""

    def release(self, slot: int, length: int) -> None:
        """Give back the blocks of a slot's tokens from `length` on."""
        ...


@runtime_checkable
class Drafting(Backend, Protocol):
    """A backend with a draft model: smaller, with the same vocabulary."""

    @property
    def draft(self) -> Backend | None:
        """Its cache has as many slots, one per sequence; None without one."""
        ...


class NextTokens(Protocol):
    """A layer of a model that predicts the token after the next one, from hidden states."""

    def draft(self, rows: Sequence[Row], counts: Sequence[int]) -> list[list[int]]:
        """So many tokens, or none, that may follow the newest one of each text, whose row is that
        of the next step."""
        ...


@runtime_checkable
class PredictsNext(Backend, Protocol):
    """A backend of a model with such a layer."""

    @property
    def next_token(self) -> NextTokens | None:
        """None: not enabled."""
        ...


@runtime_checkable
class Storing(Backend, Protocol):
    """A backend that can store prefixes in files."""

    @property
    def stored(self) -> StoredPrefixes | None:
        """None: not enabled."""
        ...


SMALLEST_CACHE = 256  # positions; sizes are powers of two, for few graphs
LONGEST_CHUNK = 512  # tokens; longer ones are no faster
STEP_TOKENS = 2048  # prompt tokens per step, besides a new token of every slot
SCORE_BYTES = 64 << 20  # bound on the attention scores of a chunk
LOGITS_BYTES = 64 << 20  # bound on the logits of a step


def cache_length(wanted: int, longest: int) -> int:
    """Positions per cache slot: a power of two of at least `wanted`, bounded by `longest`."""
    size = SMALLEST_CACHE
    while size < wanted:
        size *= 2
    return max(wanted, min(size, longest))


def unchunked(model: Decoder, length: int) -> int:
    """Length of the prompts that must go through in one step; 0: prompts can be chunked."""
    return 0 if model.prefix is None else length


def step_capacity(slots: int, whole: int = 0) -> int:
    """Tokens per step of the native kernels: prompt tokens, or a new token of every slot; besides
    these a prompt of `whole` tokens."""
    return max(LONGEST_CHUNK, slots, slots - 1 + whole)


def step_budget(slots: int, chunk: int) -> int:
    """Token budget of a step if prompts are computed one by one, `chunk` tokens at a time: more
    would not be faster, and would delay the decodes."""
    return max(STEP_TOKENS, chunk) + slots


def chunk_length(heads: int, length: int, whole: int = 0) -> int:
    """Tokens per prefill chunk over `length` keys: a power of two, at least 32; or the `whole`
    prompt."""
    if whole:
        return whole
    fits = SCORE_BYTES // (4 * heads * length)
    return min(LONGEST_CHUNK, max(32, 1 << max(0, fits.bit_length() - 1)))


def rows_at_once(vocab: int, longest: int) -> int:
    """Tokens n whose logits [n, vocab] a step returns: a power of two, or `longest`."""
    fits = max(1, LOGITS_BYTES // (4 * vocab))
    return min(longest, 1 << (fits.bit_length() - 1))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run for a backend, besides the model."""

    settings: ComputeSettings
    device: str  # "CPU" or "Ascend"
    slots: int  # rows computed together
    length: int  # tokens of a row, prompt and generated
    ranks: Ranks = Ranks()
    width: int = 1  # rows of one prompt: its beams, or its texts
    generation: Sequence[GenerationConfig] = ()  # of each prompt
    prompts: Sequence[Sequence[int]] = ()  # their token ids
    prompt_logits: bool = False  # logits of every prompt token are needed, not only of the last
    adapters: AdapterJob | None = None  # None: the base model alone
    tokenizer: Tokenizer | None = None  # None: the checkpoint has none, or nobody opened it yet
    folder: Path | None = None  # of the run, for files of an engine
    draft: ModelFiles | None = None  # a smaller model, which drafts tokens
    is_draft: bool = False
    cache_bytes: int | None = None  # limit of the KV cache; None: its full size

    @property
    def speculates(self) -> str:
        """The setting that demands drafts without a draft model; "": none does. Never in run modes
        that score texts."""
        if not self.settings.demands_drafts or self.is_draft:
            return ""
        return f"speculate={self.settings.speculate}"

    def of_draft(self, draft: ModelFiles) -> RunOptions:
        length = min(self.length, draft.model.seq_length)
        return dataclasses.replace(self, length=length, draft=None, adapters=None, is_draft=True)

    @property
    def predicts_next(self) -> bool:
        """True if the model's layer for multi-token prediction drafts."""
        return self.settings.speculate == "mtp" and not self.is_draft

    @property
    def stores_prefixes(self) -> bool:
        """True if prefixes of prompts are stored in files."""
        return not self.is_draft and self.settings.prefix_cache == "disk"

    @property
    def local_ranks(self) -> int:
        """Ranks on this machine."""
        return self.settings.parallel.local_worker_num or self.ranks.size

    @property
    def adapter_slots(self) -> int:
        """Adapters to keep loaded on the device; by default as many as can run in one batch."""
        if self.adapters is None or self.settings.adapter_dtype is None:
            return 0
        most = self.settings.max_loaded_adapters or max(1, self.slots // self.width)
        return most if self.adapters.later_rank else min(most, len(self.adapters.adapters))

    def adapter_bytes(self, model: Decoder) -> int:
        """Bytes of this rank's adapter pool on its device."""
        settings = self.settings
        if self.adapters is None or settings.adapter_dtype is None:
            return 0
        rounded = settings.adapter_dtype == "bf16"
        dtype = "bfloat16" if rounded else settings.precision.computed(self.device)
        return self.adapters.pool_bytes(model, self.ranks, self.adapter_slots, dtype)

    def rank_adapters(self, model: Decoder) -> tuple[Sequence[Adapter], LoraSize | None]:
        """This rank's shards of the adapters, and the size of their slots; None: the base model
        alone. Raises ArtifactError."""
        if self.adapters is None or self.settings.adapter_dtype is None:
            return (), None
        later = self.adapters.later_rank
        if not (adapters := self.adapters.of_rank(model, self.ranks)) and not later:
            return (), None
        from lite_runner.weights.lora.adapter import linear_sites, pool_size

        later_targets = []
        if later:
            later_targets = [site.weight for site in linear_sites(model)]
        size = pool_size(
            adapters,
            self.adapter_slots,
            rounded=self.settings.adapter_dtype == "bf16",
            later_rank=later,
            later_targets=later_targets,
        )
        return adapters, size


class Seat(Protocol):
    """A backend's entry point for runs. The package of its folder has one as SEAT."""

    # Its memory is checked first, and rows and lengths may be reduced to what fits.
    elastic: bool = False
    # Capabilities of only some backends: the same bits on every processor, hidden states for
    # embeddings.
    reproducible: bool = False
    hidden_states: bool = False

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        """Reasons why it cannot compute a run, each with a remedy; empty: it can."""
        ...

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """Memory of one rank, estimated from sizes: on CPU of its process, else on its device."""
        ...

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        """Description of the engine, for people."""
        ...

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        """The type of the weights in memory, or their quantization, for people."""
        ...

    def check(self, files: ModelFiles, options: RunOptions) -> None:
        """Note, before anything is started, what the results depend on. Raises ConfigError for what
        cannot be computed, and, but in a dry run, EnvironmentFault for what is not installed."""
        return

    def quantization(self, files: ModelFiles) -> Quantization:
        """Of the weights that it computes with. Blocks of a file are floats, but in native."""
        return files.quantization if files.quantization.rounds else Quantization()

    def details(self, files: ModelFiles, options: RunOptions) -> tuple[str, ...]:
        """Further lines of dry_run=true."""
        return ()

    def provenance(self) -> dict[str, str]:
        """Versions that the bits of a result depend on, besides the weights and the processor."""
        return {}

    def profiled(self, folder: Path) -> AbstractContextManager[None]:
        """The context of a run with profile=true; files of a profiler of its own go to a folder."""
        return nullcontext()

    def open(self, files: ModelFiles, options: RunOptions) -> Backend | Completer:
        """The backend, or what takes its place, with its weights. Several ranks must have joined.
        Raises RunnerError."""
        ...


def seat(name: str) -> Seat:
    """The seat of a backend by the name that backend= takes."""
    return cast(Seat, import_module(f"{__name__}.{BACKENDS[name]}").SEAT)
