"""Token generation: scheduling, sampling and beam search over a Backend. NumPy only, no text."""

from lite_runner.generation.engine import Engine, Generator, OnFinish, OnLogits, OnToken, Run
from lite_runner.generation.request import (
    Adjustments,
    Completion,
    Event,
    Finished,
    Generation,
    GenerationTiming,
    Guide,
    Logprobs,
    Request,
    Token,
    check_lengths,
    max_sequence_of,
    truncate_left,
)
from lite_runner.generation.sampling import logprobs_of, prompt_logprobs_of

__all__ = [
    "Adjustments",
    "Completion",
    "Engine",
    "Event",
    "Finished",
    "Generation",
    "GenerationTiming",
    "Generator",
    "Guide",
    "Logprobs",
    "OnFinish",
    "OnLogits",
    "OnToken",
    "Request",
    "Run",
    "Token",
    "check_lengths",
    "logprobs_of",
    "max_sequence_of",
    "prompt_logprobs_of",
    "truncate_left",
]
