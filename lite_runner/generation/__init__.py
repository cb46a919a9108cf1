"""Token generation: scheduling, sampling and beam search over a Backend. NumPy only, no text."""

from lite_runner.generation.adjustments import Adjustments, Guide
from lite_runner.generation.generate import OnFinish, OnLogits, OnToken, generate
from lite_runner.generation.generator import Generator, ScheduledGenerator
from lite_runner.generation.lengths import (
    check_lengths,
    max_sequence_of,
    truncate_left,
)
from lite_runner.generation.logprobs import logprobs_of, prompt_logprobs_of
from lite_runner.generation.request import (
    Completion,
    Event,
    Finished,
    Logprobs,
    Request,
    Token,
)
from lite_runner.generation.result import Generation, GenerationTiming
from lite_runner.generation.scheduler import Scheduler

__all__ = [
    "Adjustments",
    "Completion",
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
    "ScheduledGenerator",
    "Scheduler",
    "Token",
    "check_lengths",
    "generate",
    "logprobs_of",
    "max_sequence_of",
    "prompt_logprobs_of",
    "truncate_left",
]
