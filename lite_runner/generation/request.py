"""Requests, events and results of a generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.config.generation import FinishReason, GenerationConfig, Pooling
from lite_runner.errors import ConfigError, RunnerError
from lite_runner.records import dataclass

_FIRST_CHUNK = 64  # prompt tokens beside decoding, before it is known how long they take
_LEAST_CHUNK = 16  # lower bound, however long they take: fewer are hardly faster


class Guide(Protocol):
    """Restricts one sequence to a grammar."""

    def mask(self, scores: NDArray[np.floating[Any]]) -> None:
        """Set the scores [vocab] of tokens that may not come next to -inf, in place."""

    def take(self, token: int) -> None:
        """Advance by the next token."""


@dataclass(frozen=True)
class Adjustments:
    """Changes of the scores of a request's sequences, beside those of its options."""

    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    guide: Callable[[], Guide] | None = None  # makes one for each sequence


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and its generation options."""

    prompt: NDArray[np.int32]  # token ids [n], n >= 1
    options: GenerationConfig = GenerationConfig()
    adapter: str | None = None  # None: the base model
    seed_key: tuple[int, ...] = (0, 0)  # seed of the draws, with the sequence index appended
    priority: int = 0  # smaller is earlier; FIFO within a priority
    keep_logits: bool = False  # set Token.logits and Token.scores
    name: str = "the request"  # for messages
    adjustments: Adjustments | None = None
    # With prompt_logprobs the first token that gets one, at least 1: those before its predecessor
    # may come from the prefix cache.
    scored_from: int = 1
    pooling: Pooling | None = None  # for an embedding; no token is generated


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Natural log-probabilities of n tokens, and of the k most likely tokens at each position.

    They are the model's, before penalties and sampling.
    """

    chosen: NDArray[np.float64]  # [n]
    top_ids: NDArray[np.int32]  # [n, k], most likely first
    top: NDArray[np.float64]  # [n, k]

    def first(self, tokens: int) -> Logprobs:
        return Logprobs(self.chosen[:tokens], self.top_ids[:tokens], self.top[:tokens])


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt."""

    prompt_index: int  # the request's number
    return_index: int  # index among the prompt's num_return_sequences; beams: best first
    token_ids: list[int]  # generated tokens, without prompt and eos
    finish_reason: FinishReason
    score: float | None = None  # beams: log-probability over length ** length_penalty
    end_token: int | None = None  # the eos token that ended it, if any
    cached_tokens: int = 0  # prompt tokens reused from the prefix cache
    drafts: int = field(default=0, compare=False)  # steps with drafted tokens
    drafted_tokens: int = field(default=0, compare=False)  # by speculative decoding
    accepted_tokens: int = field(default=0, compare=False)  # of these
    logprobs: Logprobs | None = None  # of `drawn`
    prompt_logprobs: Logprobs | None = None  # of the prompt's tokens from Request.scored_from on
    waited_s: float = field(default=0.0, compare=False)  # until it had its cache slots
    # [vocab], after the prompt, with keep_logits and no new tokens.
    logits: NDArray[np.float32] | None = field(default=None, compare=False)
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)  # with pooling

    @property
    def drawn(self) -> list[int]:
        """All sampled tokens: token_ids and the end token."""
        return self.token_ids if self.end_token is None else [*self.token_ids, self.end_token]

    def stopped(self, tokens: int) -> Completion:
        """The completion cut after so many tokens, as if a stop string had ended it."""
        logprobs = None if self.logprobs is None else self.logprobs.first(tokens)
        ids = self.token_ids[:tokens]
        return replace(self, token_ids=ids, finish_reason="stop", end_token=None, logprobs=logprobs)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Token:
    """A new token of a sequence. Not for beam search, whose tokens are final only at the end."""

    id: int  # of the request
    index: int  # of the sequence in the request
    token: int
    count: int  # tokens of the sequence up to it
    is_end: bool = False  # an eos token, not part of the text
    logits: NDArray[np.float32] | None = None  # [vocab], with keep_logits
    scores: NDArray[np.floating[Any]] | None = None  # [vocab], processed logits
    logprobs: Logprobs | None = None  # of this token, where the options ask for them
    prompt_logprobs: Logprobs | None = None  # as of Completion, with a sequence's first token


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A sequence has finished."""

    id: int
    completion: Completion
    error: RunnerError | None = None  # the cause if finish_reason is "error"


Event = Token | Finished


def max_sequence_of(
    prompts: Sequence[int], each: Sequence[GenerationConfig], max_length: int
) -> int:
    """Maximum tokens of the longest sequence; `prompts`: prompt lengths, `each`: their options."""
    pairs = zip(prompts, each, strict=True)
    return max(options.max_sequence(prompt, max_length) for prompt, options in pairs)


def truncate_left(ids: list[int], longest: int, bos: int | None) -> list[int]:
    """The last `longest` tokens of a prompt; a leading bos stays."""
    if len(ids) <= longest or longest < 2:
        return ids
    return [ids[0], *ids[1 - longest :]] if ids[0] == bos else ids[-longest:]


def check_lengths(
    lengths: Sequence[int],
    each: Sequence[GenerationConfig],
    max_length: int,
    names: Sequence[str] = (),
) -> None:
    """Raise ConfigError naming every prompt that is empty or does not fit; call before loading.

    `lengths`: prompt lengths in tokens; `each`: their options; `max_length`: the model's limit in
    tokens; `names`: names of the prompts instead of their numbers.
    """
    errors = []
    for index, (length, options) in enumerate(zip(lengths, each, strict=True)):
        name = names[index] if names else f"prompt {index}"
        longest, new = options.max_prompt(max_length), options.reserved_tokens
        limit = min(max_length, longest + new)
        if length == 0:
            errors.append(f"{name} is empty: it has no tokens")
        elif length > longest:
            errors.append(
                f"{name} does not fit: {length} tokens and {new} new, "
                f"{length + new} together, but at most {limit} fit"
            )
    if errors:
        error = ConfigError.of(errors)
        error.hint = "shorten it, ask for fewer new tokens, or cut it with truncate=left"
        if all(text.endswith("no tokens") for text in errors):
            error.hint = "give it a text of at least one token, or leave it out"
        raise error


@dataclass
class GenerationTiming:
    """Time of forward passes and sampling, compiling excluded.

    In a step with prefill and decode tokens, every token has an equal share.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    time_to_first_token_s: float | None = None  # from the call of generate
    prefill_tokens: int = 0  # prompt tokens computed
    decode_tokens: int = 0  # tokens sampled after each sequence's first, eos included
    drafted_tokens: int = 0  # computed ahead, by speculative decoding
    accepted_tokens: int = 0  # of these, that were chosen
    preemptions: int = 0  # sequences that were preempted and recomputed

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_s else None


class Pace:
    """Bounds the prompt tokens of a step by the time that they took in earlier ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # of a step
        self._token_s: dict[bool, float] = {}  # seconds of a prompt token, by whether it is scored

    def most(self, *, scored: bool) -> int:
        """Prompt tokens of the next step."""
        if (token_s := self._token_s.get(scored)) is None:
            return _FIRST_CHUNK
        return max(_LEAST_CHUNK, int(self._seconds / token_s))

    def took(self, tokens: int, seconds: float, *, scored: bool) -> None:
        """Account for a step with so many prompt tokens."""
        if tokens >= _LEAST_CHUNK:  # the decoding beside fewer would count as theirs
            found = seconds / tokens
            self._token_s[scored] = (self._token_s.get(scored, found) + found) / 2


@dataclass
class Generation:
    """All completions, by prompt and return index, with timing."""

    completions: list[Completion]
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    interrupted: bool = False  # Ctrl-C: completions are partial
    adapter_s: Mapping[str | None, float] = field(default_factory=dict)  # step seconds by adapter
