"""The keys of completing prompts, with one backend or with two to compare."""

from __future__ import annotations

from typing import ClassVar

from lite_runner.config.options import CompareOptions, GenerateOptions, MindFormersOptions
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ComparedOptions(GenerateOptions, CompareOptions):
    """Of run modes that complete prompts once."""


@dataclass(frozen=True, kw_only=True)
class PredictOptions(ComparedOptions, MindFormersOptions):
    """Of run_mode=predict."""


@dataclass(frozen=True, kw_only=True)
class SloraOptions(ComparedOptions):
    """Of run_mode=slora."""

    adapter_lines: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False
