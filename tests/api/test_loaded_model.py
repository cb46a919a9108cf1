"""Completions as replicas send them to each other."""

from __future__ import annotations

import numpy as np

from lite_runner.api.loaded_model import completions_from_bytes, completions_to_bytes
from lite_runner.generation import Completion, Logprobs, logprobs_of, prompt_logprobs_of


def test_completions_are_sent_to_other_replicas_with_their_log_probabilities() -> None:
    found = Logprobs(np.array([-0.1]), np.array([[3, 4]], np.int32), np.array([[-0.1, -np.inf]]))
    none = Logprobs(np.zeros(0), np.zeros((0, 2), np.int32), np.zeros((0, 2)))
    sent = [
        Completion(0, 0, [], "stop", end_token=3, logprobs=found, prompt_logprobs=none),
        Completion(1, 1, [3], "length", score=-0.5, cached_tokens=2, prompt_logprobs=found),
        Completion(2, 0, [7], "length"),
    ]
    received = completions_from_bytes(completions_to_bytes(sent))
    assert received[2] == sent[2]
    for one, other in zip(received, sent, strict=True):
        assert logprobs_of(one) == logprobs_of(other)
        assert prompt_logprobs_of(one, [1, 3]) == prompt_logprobs_of(other, [1, 3])
