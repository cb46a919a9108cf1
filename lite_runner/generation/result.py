"""Results of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from lite_runner.generation.request import Completion
from lite_runner.records import dataclass


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

    @property
    def prefill_tok_s(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tok_s(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_s else None


@dataclass
class Generation:
    """All completions, by prompt and return index, with timing."""

    completions: list[Completion]
    timing: GenerationTiming = field(default_factory=GenerationTiming)
    interrupted: bool = False  # Ctrl-C: completions are partial
    adapter_s: Mapping[str | None, float] = field(default_factory=dict)  # step seconds by adapter
