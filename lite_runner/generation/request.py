"""Requests to the scheduler and its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.errors import RunnerError
from lite_runner.generation.adjustments import Adjustments


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and its generation options."""

    prompt: NDArray[np.int32]  # token ids [n], n >= 1
    options: GenerationConfig = GenerationConfig()  # noqa: RUF009  (frozen)
    adapter: str | None = None  # None: the base model
    seed_key: tuple[int, ...] = (0, 0)  # seed of the draws, with the sequence index appended
    priority: int = 0  # smaller is earlier; FIFO within a priority
    keep_logits: bool = False  # set Token.logits and Token.scores
    name: str = "the request"  # for messages
    adjustments: Adjustments | None = None


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural log-probabilities of n tokens, and of the k most likely tokens at each position.

    They are the model's, before penalties and sampling.
    """

    chosen: NDArray[np.float64]  # [n]
    top_ids: NDArray[np.int32]  # [n, k], most likely first
    top: NDArray[np.float64]  # [n, k]


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt."""

    prompt_index: int  # the request's number
    return_index: int  # which of the prompt's num_return_sequences; beams: best first
    token_ids: list[int]  # generated tokens, without prompt and eos
    finish_reason: FinishReason
    score: float | None = None  # beams: log-probability over length ** length_penalty
    end_token: int | None = None  # the eos token that ended it, if any
    cached_tokens: int = 0  # prompt tokens reused from the prefix cache
    logprobs: Logprobs | None = None  # of `drawn`
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens but the first
    waited_s: float = field(default=0.0, compare=False)  # until it had its cache slots

    @property
    def drawn(self) -> list[int]:
        """All sampled tokens: token_ids and the end token."""
        return self.token_ids if self.end_token is None else [*self.token_ids, self.end_token]


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A new token of a sequence. Not for beam search, whose tokens are final only at the end."""

    id: int  # of the request
    index: int  # of the sequence in the request
    token: int
    is_end: bool = False  # an eos token, not part of the text
    logits: NDArray[np.float32] | None = None  # [vocab], with keep_logits
    scores: NDArray[np.floating[Any]] | None = None  # [vocab], processed logits
    logprobs: Logprobs | None = None  # of this token, where the options ask for them
    prompt_logprobs: Logprobs | None = None  # as of Completion, with a sequence's first token


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A sequence has finished."""

    id: int
    completion: Completion
    error: RunnerError | None = None  # the cause if finish_reason is "error"


Event = Token | Finished
