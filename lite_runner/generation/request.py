"""What is asked of the scheduler, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason, GenerationConfig
from lite_runner.errors import RunnerError


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt, and how it is to be continued."""

    prompt: NDArray[np.int32]  # token ids [n], n >= 1
    options: GenerationConfig = GenerationConfig()  # noqa: RUF009  (frozen)
    adapter: str | None = None  # None: the base model
    seed_key: tuple[int, ...] = (0, 0)  # with a sequence's index behind it, what its draws are from
    priority: int = 0  # the smaller, the earlier; those of one come in the order they were added
    keep_logits: bool = False  # Token.logits and Token.scores are wanted
    name: str = "the request"  # in messages


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural log-probabilities of n tokens, and of the k most likely at the place of each.

    They are those of the model, before penalties and sampling.
    """

    chosen: NDArray[np.float64]  # [n]
    top_ids: NDArray[np.int32]  # [n, k], most likely first
    top: NDArray[np.float64]  # [n, k]


@dataclass(frozen=True)
class Completion:
    """One continuation of one prompt."""

    prompt_index: int  # the request's number
    return_index: int  # which of the prompt's num_return_sequences; beams: best first
    token_ids: list[int]  # what was generated: without the prompt and without the eos token
    finish_reason: FinishReason
    score: float | None = None  # beams: log-probability over length ** length_penalty
    end_token: int | None = None  # the eos token that ended it; None: something else did
    cached_tokens: int = 0  # of the prompt, which were in the cache already
    logprobs: Logprobs | None = None  # of `drawn`
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens but the first

    @property
    def drawn(self) -> list[int]:
        """Every token that was chosen: token_ids and the end token."""
        return self.token_ids if self.end_token is None else [*self.token_ids, self.end_token]


@dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A sequence has a new token. Of beams, where none is sure before the end, there is none."""

    id: int  # of the request
    index: int  # of the sequence among the request's
    token: int
    is_end: bool = False  # an eos token, which is no part of the text
    logits: NDArray[np.float32] | None = None  # [vocab], with keep_logits
    scores: NDArray[np.floating[Any]] | None = None  # [vocab], what the token was chosen by


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A sequence is over; no token of it follows."""

    id: int
    completion: Completion
    error: RunnerError | None = None  # why, where its finish_reason is "error"


Event = Token | Finished
