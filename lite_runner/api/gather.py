"""Completions of all replicas, on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from lite_runner.config.ranks import Ranks
from lite_runner.generation import Completion, Logprobs


def gather_completions(completions: Sequence[Completion], ranks: Ranks) -> list[Completion]:
    """The completions of all replicas, on every rank, in the order of the prompts."""
    if ranks.data == 1:
        return list(completions)
    from lite_runner.backends.collectives import gather

    payloads = gather(completions_to_bytes(completions))
    return [one for data in payloads[:: ranks.tensor] for one in completions_from_bytes(data)]


def completions_to_bytes(completions: Sequence[Completion]) -> bytes:
    """JSON, arrays as lists."""
    return json.dumps([asdict(one) for one in completions], default=np.ndarray.tolist).encode()


def completions_from_bytes(data: bytes) -> list[Completion]:
    """What `completions_to_bytes` was given."""
    return [_completion(raw) for raw in json.loads(data)]


def _completion(raw: dict[str, Any]) -> Completion:
    for name in ("logprobs", "prompt_logprobs"):
        if raw[name] is not None:
            raw[name] = Logprobs(
                np.array(raw[name]["chosen"], np.float64),
                np.array(raw[name]["top_ids"], np.int32),
                np.array(raw[name]["top"], np.float64),
            )
    return Completion(**raw)
