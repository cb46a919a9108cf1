"""Generation: which tokens follow a prompt. NumPy and a Backend; no text, no framework."""

from lite_runner.generation.loop import check_lengths, generate, longest_prompt
from lite_runner.generation.result import Completion, FinishReason, Generation, GenerationTiming

__all__ = [
    "Completion",
    "FinishReason",
    "Generation",
    "GenerationTiming",
    "check_lengths",
    "generate",
    "longest_prompt",
]
