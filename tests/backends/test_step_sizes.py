from __future__ import annotations

import pytest

from lite_runner.backends.step_sizes import cache_length, chunk_length


@pytest.mark.parametrize(
    ("wanted", "longest", "expected"),
    [(10, 8192, 256), (256, 8192, 256), (257, 8192, 512), (10, 128, 128), (1000, 1000, 1000)],
)
def test_cache_lengths_are_few(wanted: int, longest: int, expected: int) -> None:
    assert cache_length(wanted, longest) == expected


def test_chunks_shrink_as_scores_grow() -> None:
    assert [chunk_length(9, length) for length in (256, 8192, 32768)] == [512, 128, 32]
