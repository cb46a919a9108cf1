"""The Backend protocol: all that generation knows of the thing that computes logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from lite_runner.weights.lora.adapter import Adapter

BASE = -1  # the adapter slot of the base model


@dataclass(frozen=True, slots=True)
class Row:
    """Work for one cache slot in one step."""

    slot: int
    tokens: NDArray[np.int32]  # [n], n >= 1: a prompt, a chunk of one, or one new token
    position: int  # tokens before these; what the slot holds from here on is dropped
    adapter_slot: int = BASE
    logits: int = 1  # after how many of the last tokens logits are wanted, 0 to n
    length: int = 0  # tokens of the whole prompt, where this is a chunk of it; 0: it ends here

    @property
    def end(self) -> int:
        """Tokens of the text that the row's last token is seen with: of a chunk the prompt's."""
        return max(self.length, self.position + len(self.tokens))


@dataclass(frozen=True)
class BackendInfo:
    """What a backend is, and what it can do."""

    engine: str  # what computes; stands in result.json
    vocab_size: int
    slots: int  # rows that it holds at a time
    max_length: int  # tokens that fit a slot: prompt and all generated
    budget: int  # tokens that a step takes at best
    # A prompt is cut at multiples of it. 1: anywhere, for a row's logits depend on its own tokens
    # alone, to the bit, however they are cut and whatever is computed beside them.
    chunk: int
    most_logits: int = 0  # after tokens that are not a row's last: how many a step gives
    can_copy: bool = True  # a slot's content to another
    # Whether what a slot holds depends on its own tokens alone, not on how long their text is, so
    # that any text that begins alike can go on from it.
    can_continue: bool = True

    @property
    def exact(self) -> bool:
        """Whether a row's logits are the same to the bit in any company."""
        return self.chunk == 1


class AdapterSlots(Protocol):
    """The adapters of a backend, known by name; a row's must be in one of few slots in memory."""

    slots: int
    loads: int  # into a slot, so far
    nbytes: int  # that the slots take

    def add(self, adapter: Adapter) -> None:
        """Know an adapter from now on, in the place of one of its name.

        Raises ConfigError where it does not fit what the slots were made for, or while the one of
        its name is pinned.
        """
        ...

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises ConfigError where it is not known, or pinned."""
        ...

    def version(self, name: str) -> int:
        """A number that no other adapter has or had, not even of the same name.

        Raises ConfigError for an unknown name, with the nearest known one.
        """
        ...

    def pin(self, name: str) -> int | None:
        """The slot of an adapter, loaded if need be, which stays there until it is unpinned as
        often; None while all slots are pinned. The least recently used makes room."""
        ...

    def unpin(self, name: str) -> None:
        """Let another adapter have the slot when it needs one."""
        ...


class Backend(Protocol):
    """Rows over cache slots. A row's logits never depend on the other rows; see `exact`."""

    @property
    def info(self) -> BackendInfo: ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """None: it has the base model alone."""
        ...

    @property
    def compile_s(self) -> float:
        """Seconds spent on compiling so far, within whichever call that happened."""
        ...

    def prepare(self) -> None:
        """Do now what the first token would wait for; `forward` does it where this was not."""
        ...

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [sum of row.logits, vocab_size], in the order of the rows and of their tokens.

        A slot occurs once. More than one row of logits for a row is only asked of a backend that
        has `most_logits`, and then at most so many in all.
        """
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Slot targets[i] becomes slot sources[i]; all are read before any is written."""
        ...

    def close(self) -> None:
        """Release what the backend holds; calling it twice is harmless."""
        ...


@runtime_checkable
class Growing(Backend, Protocol):
    """A backend whose cache can be made anew while its weights stay."""

    def grow(self, slots: int, length: int) -> None:
        """Hold so many rows of so many tokens from now on; what was in the cache is gone."""
        ...
