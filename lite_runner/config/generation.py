"""Options of a generation, and the lengths that they allow; ranges are validated in the config."""

from __future__ import annotations

from typing import Literal

from lite_runner.records import dataclass

# Why a text ended. "stop": an eos token or a stop text; "error": see Finished.error.
FinishReason = Literal["stop", "length", "interrupted", "error"]


@dataclass(frozen=True)
class GenerationConfig:
    """Options of one generation, named as in MindFormers and transformers."""

    max_new_tokens: int | None = None
    max_length: int | None = None  # prompt and new tokens; with it new tokens may be fewer
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    stop: tuple[str, ...] = ()  # stop strings, not part of the completion
    seed: int = 0
    logprobs: int | None = None  # of each token and its top N alternatives; None: off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens

    @property
    def reserved_tokens(self) -> int:
        """New tokens that a prompt must leave room for."""
        if self.max_length is not None or self.max_new_tokens is None:
            return 1
        return self.max_new_tokens

    def max_prompt(self, context: int) -> int:
        """Maximum prompt tokens in a context of `context` tokens; below 1 no prompt fits."""
        return self._max_total(context) - self.reserved_tokens

    def max_sequence(self, prompt: int, context: int) -> int:
        """Maximum tokens of a prompt of `prompt` tokens and its completion together."""
        limit, new = self._max_total(context), self.max_new_tokens
        return limit if new is None else min(limit, prompt + new)

    def exceeded_limit(self, context: int) -> Literal["max_new_tokens", "max_length"] | None:
        """The option that asks for more than a context of `context` tokens can hold."""
        if self.max_length is not None:
            return "max_length" if self.max_length > context else None
        too_many = self.max_new_tokens is not None and self.max_prompt(context) < 1
        return "max_new_tokens" if too_many else None

    def _max_total(self, context: int) -> int:
        return min(context, self.max_length or context)
