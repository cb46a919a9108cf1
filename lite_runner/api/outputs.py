"""What generate and pipelines return: texts, or the dict of return_dict_in_generate=True."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.generation import Completion, logprobs_of, prompt_logprobs_of
from lite_runner.text.tokenizer import Tokenizer
from lite_runner.text.transcript import Transcript


class StepOutputs:
    """Collects the logits and scores of every step for return_dict_in_generate=True."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._scores = bool(options.get("output_scores"))
        self._logits = bool(options.get("output_logits"))
        self.wanted = self._scores or self._logits  # what `on_logits` sees
        self._rows: dict[tuple[int, int], list[tuple[NDArray[Any], NDArray[Any]]]] = {}

    def on_logits(
        self, prompt: int, part: int, logits: NDArray[np.float32], scores: NDArray[Any]
    ) -> None:
        """Keeps copies: the next step may overwrite the arrays."""
        row = (logits.copy() if self._logits else logits[:0], scores.copy())
        self._rows.setdefault((prompt, part), []).append(row)

    def result(
        self, prompts: Sequence[list[int]], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        """The dict; a sequence has zeros in the steps after its end."""
        rows = [self._rows.get((one.prompt_index, one.return_index), []) for one in completions]
        found: dict[str, Sequence[Any]] = {
            "logprobs": [logprobs_of(one) for one in completions],
            "prompt_logprobs": [
                prompt_logprobs_of(one, prompts[one.prompt_index]) for one in completions
            ],
        }
        return {
            "sequences": sequences_of(prompts, completions),
            "scores": _stacked(rows, 1) if self._scores else None,
            "logits": _stacked(rows, 0) if self._logits else None,
            **{name: every for name, every in found.items() if None not in every},
        }


def sequences_of(
    prompts: Sequence[list[int]], completions: Sequence[Completion]
) -> list[list[int]]:
    """Prompt and drawn tokens of each completion."""
    return [[*prompts[one.prompt_index], *one.drawn] for one in completions]


def _stacked(
    rows: Sequence[Sequence[tuple[NDArray[Any], NDArray[Any]]]], which: int
) -> list[NDArray[np.float32]]:
    """For each step an array [sequences, vocab]."""
    found = []
    for step in range(max(map(len, rows), default=0)):
        there = [(index, row[step][which]) for index, row in enumerate(rows) if step < len(row)]
        array = np.zeros((len(rows), len(there[0][1])), np.float32)
        for index, values in there:
            array[index] = values
        found.append(array)
    return found


def texts_of(
    completions: Sequence[Completion], tokenizer: Tokenizer, stop: Sequence[str]
) -> list[str]:
    """The text of each completion as it follows its prompt, cut at a stop text."""
    texts = []
    for completion in completions:
        transcript = Transcript(tokenizer, stop, continues=True)
        for token in completion.token_ids:
            transcript.put(token)
        transcript.finish()
        texts.append(transcript.text)
    return texts
