"""The Backend protocol: all that generation knows of the thing that computes logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Row:
    """Work for one cache slot in one step."""

    slot: int  # which cache slot
    tokens: NDArray[np.int32]  # [n], n >= 1: a prompt, a chunk of one, or one new token
    position: int  # tokens already in the slot
    adapter: int = 0  # 0 is the base model


class Backend(Protocol):
    """Rows over cache slots. A row's logits never depend on the other rows."""

    engine: str  # what computes; stands in result.json
    vocab_size: int
    max_length: int  # tokens that fit a slot: prompt and all generated
    slots: int
    compile_s: float  # spent on compiling so far, within whichever call it happened

    def prepare(self) -> None:
        """Do now what the first token would wait for; `forward` does it where this was not."""
        ...

    def forward(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab_size] after each row's last token; a slot occurs once."""
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


@runtime_checkable
class Scorer(Backend, Protocol):
    """A backend that tells how likely a text is, not only what comes next."""

    def logits(self, tokens: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """Logits after each of `tokens` [n], n <= max_length, in parts [k, vocab] in order.

        They begin an empty cache in slot 0, which they overwrite.
        """
        ...

    def scores(self, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
        """Natural log-likelihood of each of tokens[1:] given those before it [n - 1].

        `tokens` [n], 2 <= n <= max_length, begin an empty cache in slot 0, which they overwrite.
        """
        ...
