"""How tokens are drawn. Plain data; the ranges are checked where the config is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Why a text ended. "stop": an eos token or a stop text; "error": see Finished.error.
FinishReason = Literal["stop", "length", "interrupted", "error"]


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
    logprobs: int | None = None  # of each token, and of so many of the most likely ones; None: none
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
