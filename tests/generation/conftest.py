from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.generation.mock import Logits, MockBackend, hashed_logits

Make = Callable[..., MockBackend]


@pytest.fixture
def backend() -> Make:
    def make(
        logits: Logits = hashed_logits,
        *,
        slots: int = 4,
        max_length: int = 64,
        adapter_slots: int = 4,
        **info: object,
    ) -> MockBackend:
        return MockBackend(logits, slots, max_length, adapter_slots, **info)

    return make
