"""How tokens are drawn. Plain data; the ranges are checked where the config is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class GenerationConfig:
    """Options of one generation, named as in MindFormers and transformers."""

    max_new_tokens: int | None = None
    max_length: int | None = (
        None  # prompt and new tokens together; fewer are new where it ends them
    )
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
    stop: tuple[str, ...] = ()  # texts that end a completion; not part of the result
    seed: int = 0


@dataclass(frozen=True)
class OwnOptions:
    """What one prompt has of its own; None: as all of them."""

    max_new_tokens: int | None = None
    seed: int | None = None  # its text is drawn as if it were the only prompt

    def over(self, shared: GenerationConfig) -> GenerationConfig:
        """`shared` as it is for this prompt."""
        if self.max_new_tokens is not None:
            shared = replace(shared, max_new_tokens=self.max_new_tokens, max_length=None)
        return shared if self.seed is None else replace(shared, seed=self.seed)


def of_each(
    shared: GenerationConfig, own: Sequence[OwnOptions], prompts: int
) -> list[GenerationConfig]:
    """The options of each of so many prompts; `own` is empty, or one for each."""
    return [options.over(shared) for options in own] if own else [shared] * prompts
