"""Embeddings: hidden states pooled beside generation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.backends import Row
from lite_runner.config.generation import GenerationConfig
from lite_runner.errors import ConfigError, NonFiniteError
from lite_runner.generation import Engine, Finished, Request
from tests.generation.mock import MockBackend, hashed_logits

PROMPT = np.array([1, 2, 3], np.int32)


class HiddenBackend(MockBackend):
    """One that gives hidden states: of each token its id, and how many stand before it."""

    def hidden(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        self.forward(rows)
        places = [
            (int(row.tokens[at]), row.position + at)
            for row in rows
            for at in range(len(row.tokens) - row.logits, len(row.tokens))
        ]
        return np.array(places, np.float32).reshape(-1, 2)


def embedded(engine: Engine, requests: Sequence[Request]) -> list[list[float]]:
    ids = [engine.add(request) for request in requests]
    found = {}
    for events in engine.run():
        for event in events:
            if isinstance(event, Finished) and event.id in ids:
                assert event.completion.embedding is not None
                found[event.id] = event.completion.embedding.tolist()
    return [found[id] for id in ids]


def test_prompts_are_pooled_beside_generation() -> None:
    """Mean and last, in chunks, with and without cached prefixes."""
    backend = HiddenBackend(hashed_logits, 3, 64, 4, hidden_size=2, most_logits=8)
    engine, prompts = Engine(backend, 8), [list(range(length)) for length in (1, 9, 16, 12)]
    options = GenerationConfig(max_new_tokens=0)
    for _ in range(2):  # the second time from cached prefixes
        engine.add(Request(np.array([3, 2, 1], np.int32), GenerationConfig(max_new_tokens=6)))
        for pooling in ("mean", "last"):
            asked = [Request(np.array(p, np.int32), options, pooling=pooling) for p in prompts]
            half = 2 if pooling == "mean" else 1
            expected = [[(len(p) - 1) / half] * 2 for p in prompts]
            assert embedded(engine, asked) == expected
    id = engine.add(Request(np.array(prompts[2], np.int32), options, pooling="mean"))
    engine.step()
    (ended,) = engine.finish(id)
    assert ended.completion.embedding is None and engine.idle
    with pytest.raises(ConfigError, match="mock gives no embeddings"):
        Engine(MockBackend(hashed_logits, 3, 64, 4)).add(asked[0])


def test_an_embedding_that_is_not_finite_is_an_error() -> None:
    backend = HiddenBackend(hashed_logits, 2, 64, 4, hidden_size=2)
    backend.hidden = lambda rows: np.full((1, 2), np.nan, np.float32)  # type: ignore[method-assign]
    engine = Engine(backend)
    engine.add(Request(PROMPT, GenerationConfig(max_new_tokens=0), pooling="last"))
    (event,) = engine.step()
    assert isinstance(event, Finished) and isinstance(event.error, NonFiniteError)


def test_one_that_makes_room_is_pooled_anew() -> None:
    backend = HiddenBackend(hashed_logits, 3, 36, 4, hidden_size=2, most_logits=8, memory=(4, 9))
    engine = Engine(backend, 3)
    engine.add(Request(PROMPT, GenerationConfig(max_new_tokens=28, eos_token_id=())))
    for _ in range(12):
        engine.step()
    prompt = np.arange(16, dtype=np.int32)
    asked = Request(prompt, GenerationConfig(max_new_tokens=0), pooling="mean")
    assert embedded(engine, [asked]) == [[7.5, 7.5]]
    assert engine.scheduler.timing.preemptions == 1
