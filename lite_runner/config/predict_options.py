"""The keys of run_mode=predict."""

from __future__ import annotations

from dataclasses import dataclass

from lite_runner.config.options import CompareOptions, GenerateOptions, MindFormersOptions


@dataclass(frozen=True, kw_only=True)
class PredictOptions(GenerateOptions, CompareOptions, MindFormersOptions):
    """Completing prompts, with one backend or with two to compare."""
