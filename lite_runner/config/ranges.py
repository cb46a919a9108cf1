"""The numbers that settings take: types with their ranges, for the reader in fields.py."""

from __future__ import annotations

from typing import Annotated

from lite_runner.config.fields import Range

Count = Annotated[int, Range(1)]
Index = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Probability = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 1, above=True)]
TopP = Fraction
TopLogprobs = Annotated[int, Range(0, 100)]
