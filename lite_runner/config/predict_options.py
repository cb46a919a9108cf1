"""The keys of run_mode=predict."""

from __future__ import annotations

from lite_runner.config.options import CompareOptions, GenerateOptions, MindFormersOptions
from lite_runner.records import dataclass


@dataclass(frozen=True, kw_only=True)
class PredictOptions(GenerateOptions, CompareOptions, MindFormersOptions):
    """Completing prompts, with one backend or with two to compare."""
