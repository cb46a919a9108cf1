"""Speculative decoding: drafts by prompt lookup, and the length of drafts that pays.

Where the last tokens of a sequence occurred before, in its prompt or its output, the tokens that
followed them there are drafted. A step computes the logits after each drafted token; tokens that
would have been chosen anyway are kept, so results do not depend on drafts. Needs a backend with
batch-invariant logits.

After Saxena, Prompt Lookup Decoding (2023), and transformers' prompt_lookup_num_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

MOST_DRAFTED = 8  # tokens of a sequence in a step: more would cost about as much as they save
_SHORTEST, _LONGEST = 2, 4  # tokens that occur again; of more, the newest place is as good
_MOST_TRIED = 16  # places where the last two tokens occurred
_FIRST_RATE = 0.0  # of acceptance: two guesses that were right, but not drafted, come first
_ROW_COST = 0.2  # a token's share of the time of a step with one, before a draft was timed
_WEIGHT = 0.2  # of the newest observation
_FORGOTTEN = 0.01  # of what drafted tokens cost, in a step without
_MARGIN = 1.2  # by which a draft has to be worth more than it costs
_SHARE = 0.01  # of the time of steps without drafts, for trying again
_MOST_CREDIT = 0.5  # seconds gained that later tries may cost


class Drafter(Protocol):
    """Drafts for one sequence, and their rate of acceptance."""

    rate: float

    def draft(self, most: int) -> list[int]:
        """At most `most` tokens that may come next."""
        ...

    def extend(self, tokens: Sequence[int], drafted: int) -> None:
        """Add the tokens that were chosen where `drafted` ones were computed ahead."""
        ...


class PromptLookup:
    """Drafts what followed the newest tokens before. See Drafter."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._text: list[int] = prompt.tolist()
        self._places: dict[tuple[int, int], int] = {}  # two tokens -> where they ended last
        self._earlier = [0, 0]  # of each place, where the two tokens before it ended before; 0: no
        self._expected: list[int] = []  # the tokens after the newest match
        self.rate = _FIRST_RATE

    def draft(self, most: int) -> list[int]:
        if not self._expected:
            self._expected = self._found()
        return self._expected[:most]

    def extend(self, tokens: Sequence[int], drafted: int) -> None:
        expected, self._expected = self._expected, []
        for place, token in enumerate(tokens):
            self._text.append(token)
            # Acceptance is observed without a draft too: would its first token have been chosen?
            if place < len(expected) and place <= max(drafted - 1, 0):
                right = token == expected[place]
                self.rate += _WEIGHT * (right - self.rate)
        if len(expected) > len(tokens) and expected[: len(tokens)] == list(tokens):
            self._expected = expected[len(tokens) :]

    def _found(self) -> list[int]:
        """The tokens after the newest earlier occurrence of the last ones, of as many of these as
        occurred."""
        text, places, earlier = self._text, self._places, self._earlier
        for stop in range(len(earlier), len(text)):  # all but the two that end here
            pair = text[stop - 2], text[stop - 1]
            earlier.append(places.get(pair, 0))
            places[pair] = stop
        found, longest = 0, _SHORTEST - 1
        place = places.get((text[-2], text[-1]), 0) if len(text) > _SHORTEST else 0
        for _ in range(_MOST_TRIED):
            size = _SHORTEST
            while size < min(_LONGEST, place) and text[place - size - 1] == text[-size - 1]:
                size += 1
            if place and size > longest:
                found, longest = place, size
            if not place or longest == _LONGEST:
                break
            place = earlier[place]
        return text[found : found + 4 * MOST_DRAFTED] if found else []


class StepCost:
    """The time of decoding steps, with drafted tokens and without, by the number of sequences, and
    what drafts have gained."""

    most_drafted = MOST_DRAFTED

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # sequences -> seconds of a step
        self._row: dict[int, float] = {}  # sequences -> a drafted token's share of these
        self.credit = 0.0  # seconds gained, less those spent

    def took(
        self, sequences: int, drafted: int, accepted: int, seconds: float, reading_s: float = 0.0
    ) -> None:
        """Account for a step of decoding alone; `reading_s` of it were for later drafts."""
        plain = self._plain.get(sequences)
        if not drafted and not reading_s:
            self._earn(_SHARE * seconds)
            plain = seconds if plain is None else plain
            self._plain[sequences] = plain + _WEIGHT * (seconds - plain)
            if (row := self._row.get(sequences)) is not None:  # one slow step is forgotten
                self._row[sequences] = row + _FORGOTTEN * (_expected(sequences) - row)
        elif plain is not None:
            # Of a step that something else delayed, at most its tokens one by one count.
            spent = min(seconds, reading_s + plain * (2 + drafted))
            self._earn(plain * (1 + accepted / sequences) - spent)
            if not drafted:
                return
            found = max(0.0, ((seconds - reading_s) / plain - 1.0) / drafted)
            before = self._row.get(sequences, found)
            self._row[sequences] = before + _WEIGHT * (found - before)

    def most(self, sequences: int, rate: float) -> int:
        """Tokens to draft for one of so many sequences: none while drafts have cost more than they
        gained."""
        return self.worth(sequences, rate) if self.credit >= 0 else 0

    def worth(self, sequences: int, rate: float) -> int:
        """Tokens worth drafting for one of so many sequences, each accepted at this rate after
        those before it."""
        if sequences not in self._plain:
            return 0  # not timed yet
        # The last one has to give more than it costs: rate ** most tokens, of which a step without
        # drafts gives one for each sequence.
        cost = _MARGIN * self._row.get(sequences, _expected(sequences)) * sequences
        most, gain = 0, rate
        while most < MOST_DRAFTED and gain > cost:
            most, gain = most + 1, gain * rate
        return most

    def _earn(self, seconds: float) -> None:
        self.credit = min(_MOST_CREDIT, self.credit + seconds)


class PromptLookups(StepCost):
    """Drafts of many sequences by prompt lookup; `DraftModel` has the same methods."""

    sequence = PromptLookup

    def draft(self, most: Callable[[float], int], groups: Iterable[object]) -> None:
        """Nothing is to be computed before the step."""


def _expected(sequences: int) -> float:
    """A drafted token's share of a step's time, before one was timed."""
    return _ROW_COST / (1.0 + _ROW_COST * (sequences - 1))
