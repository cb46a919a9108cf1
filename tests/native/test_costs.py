"""Costs of native layers, and what the machine is measured to have."""

from __future__ import annotations

import numpy as np

from lite_runner import profiler
from lite_runner.backends import Row
from lite_runner.native import costs


def test_multiply_adds_are_those_of_the_matrices(reference: object) -> None:
    """A token takes a multiply-add for each parameter of a matrix but those of the embedding, and
    two of a head's width for each key that it sees."""
    assert callable(reference)
    known = reference("llama")
    backend = known.native(2, 64)
    recorder = profiler.start()
    try:
        backend.forward([Row(0, np.arange(1, 6, dtype=np.int32), 0)])
        backend.forward([Row(0, np.array([7], np.int32), 5)])
    finally:
        profiler.stop()
    config = known.config
    found = {one.name: one for one in recorder.report().kernels}
    block = config.blocks[0]
    attention, width, hidden = block.attention, block.feed_forward.width, config.hidden_size
    queries = attention.heads * attention.head_dim
    keys = attention.kv_heads * attention.head_dim
    layers = len(config.blocks)
    seen = 1 + 2 + 3 + 4 + 5 + 6
    assert found["attention"].macs == layers * (
        6 * hidden * (2 * queries + 2 * keys) + 2 * queries * seen
    )
    assert found["feed_forward"].macs == layers * 6 * 3 * hidden * width
    assert found["head"].macs == 2 * hidden * config.vocab_size
    assert found["attention"].calls == 2 * layers
    read = found["attention"].bytes
    backend.forward([Row(0, np.array([7], np.int32), 6)])  # nobody records any more
    assert {one.name: one for one in recorder.report().kernels}["attention"].bytes == read


def test_the_machine_is_measured() -> None:
    assert costs.bandwidth() > 1e8
    assert costs.peak() > 1e8
