"""What a generation gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lite_runner.generation.request import Completion


@dataclass
class GenerationTiming:
    """Where the time went; forward passes and the choice of tokens both count, compiling does not.

    Of a step that computes prompts and new tokens together, each token has an equal part.
    """

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
    adapter_s: Mapping[str | None, float] = field(default_factory=dict)  # of the steps, by adapter
