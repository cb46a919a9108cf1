"""Greedy search and sampling: the completions of one prompt, each on its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lite_runner.backends.base import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.generation.result import Completion, FinishReason, OnLogits, OnToken
from lite_runner.generation.sampling import Sampler, warped


@dataclass
class _Sequence:
    return_index: int
    sampler: Sampler
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    end_token: int | None = None


class Samples:
    """Several completions of one prompt, drawn independently. A `Job` of the loop."""

    def __init__(
        self,
        prompt: NDArray[np.int32],
        prompt_index: int,
        returns: Sequence[int],
        config: GenerationConfig,
        *,
        limit: int,
        adapter: int,
        alone: bool = False,
        on_token: OnToken | None,
        on_logits: OnLogits | None = None,
    ) -> None:
        self.prompt = prompt
        self.prompt_index = prompt_index
        self.adapter = adapter
        self.width = len(returns)
        self._limit = limit
        self._eos = frozenset(config.eos_token_id)
        self._on_token = on_token
        self._on_logits = on_logits
        self._config = config
        self._sequences = [
            _Sequence(index, Sampler(config, prompt, prompt_index, index, alone=alone))
            for index in returns
        ]

    def begin(self, slots: Sequence[int], logits: NDArray[np.float32]) -> None:
        """Choose the first tokens; each of `slots` holds the prompt, `logits` [vocab] follow it."""
        for sequence, slot in zip(self._sequences, slots, strict=True):
            sequence.slot = slot
            self._extend(sequence, logits)

    def rows(self) -> list[Row]:
        """The newest token of every sequence that goes on."""
        return [
            Row(
                slot=sequence.slot,
                tokens=np.array(sequence.tokens[-1:], dtype=np.int32),
                position=len(self.prompt) + len(sequence.tokens) - 1,
                adapter=self.adapter,
            )
            for sequence in self._going_on()
        ]

    def advance(self, logits: NDArray[np.float32]) -> tuple[list[int], list[int]]:
        """Choose the next tokens by `logits` [rows, vocab]; no slot is to be copied."""
        for sequence, row in zip(self._going_on(), logits, strict=True):
            self._extend(sequence, row)
        return [], []

    def slots_in_use(self) -> list[int]:
        return [sequence.slot for sequence in self._going_on()]

    def completions(self) -> list[Completion]:
        return [
            Completion(
                self.prompt_index,
                sequence.return_index,
                list(sequence.tokens),
                sequence.finish_reason or "interrupted",
                end_token=sequence.end_token,
            )
            for sequence in self._sequences
        ]

    def finished(self) -> list[int]:
        return [s.return_index for s in self._sequences if s.finish_reason is not None]

    def _going_on(self) -> list[_Sequence]:
        return [sequence for sequence in self._sequences if sequence.finish_reason is None]

    def _extend(self, sequence: _Sequence, logits: NDArray[np.float32]) -> None:
        token = sequence.sampler.choose(logits)
        if self._on_logits:
            scores = warped(sequence.sampler.scores, self._config)
            self._on_logits(self.prompt_index, sequence.return_index, logits, scores)
        if token in self._eos:
            sequence.finish_reason, sequence.end_token = "stop", token
            return
        sequence.tokens.append(token)
        if self._on_token and self._on_token(self.prompt_index, sequence.return_index, token):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= self._limit:
            sequence.finish_reason = "length"
