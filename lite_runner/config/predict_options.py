"""The keys of run_mode=predict."""

from __future__ import annotations

from dataclasses import dataclass

from lite_runner.config.options import CompareOptions, GenerateOptions, MindFormersOptions


@dataclass(frozen=True, kw_only=True)
class PredictOptions(GenerateOptions, CompareOptions, MindFormersOptions):
    """Completing prompts, with one backend or with two to compare."""

    @property
    def names_mindformers(self) -> bool:
        """Whether MindFormers computes, alone or to compare with."""
        return "mindformers" in (self.backend, self.compare_backend)
