"""What a generation gives back, and the hooks that see it grow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "interrupted"]

# (prompt index, return index, token id); a true answer ends the sequence.
OnToken = Callable[[int, int, int], "bool | None"]
# (prompt index, return index, logits [vocab], what the token was chosen by [vocab]).
OnLogits = Callable[[int, int, NDArray[np.float32], NDArray[np.floating[Any]]], None]


@dataclass(frozen=True)
class Completion:
    """One continuation of one prompt."""

    prompt_index: int
    return_index: int  # which of the prompt's num_return_sequences; beams: best first
    token_ids: list[int]  # what was generated: without the prompt and without the eos token
    finish_reason: FinishReason  # "stop": an eos token, or the on_token hook said so
    score: float | None = None  # beams: log-probability over length ** length_penalty
    end_token: int | None = None  # the eos token that ended it; None: something else did

    @property
    def drawn(self) -> list[int]:
        """Every token that was chosen: token_ids and the end token."""
        return self.token_ids if self.end_token is None else [*self.token_ids, self.end_token]


# Hears of each completion as soon as it is final.
OnFinish = Callable[[Completion], None]


@dataclass
class GenerationTiming:
    """Where the time went; forward passes and the choice of tokens both count."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token_s: float | None = None  # from the call of generate
    prefill_tokens: int = 0  # prompt tokens put through the model
    decode_tokens: int = 0  # tokens chosen after each sequence's first, eos included

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_s else None


@dataclass
class Generation:
    """All completions, by prompt and return index, and how it went."""

    completions: list[Completion]
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    interrupted: bool = False  # Ctrl-C: completions hold what there was
