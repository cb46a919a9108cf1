"""The keys of run_mode=predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lite_runner.config.options import CompareOptions, GenerateOptions


@dataclass(frozen=True, kw_only=True)
class PredictOptions(GenerateOptions, CompareOptions):
    """Completing prompts, with one backend or with two to compare."""

    runs_mindformers: ClassVar[bool] = True
