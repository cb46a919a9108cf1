from __future__ import annotations

import pytest

from lite_runner.backends import LOGITS_BYTES, cache_length, chunk_length, rows_at_once


@pytest.mark.parametrize(
    ("wanted", "longest", "expected"),
    [(10, 8192, 256), (256, 8192, 256), (257, 8192, 512), (10, 128, 128), (1000, 1000, 1000)],
)
def test_cache_lengths_are_few(wanted: int, longest: int, expected: int) -> None:
    assert cache_length(wanted, longest) == expected


def test_chunks_shrink_as_scores_grow() -> None:
    assert [chunk_length(9, length) for length in (256, 8192, 32768)] == [512, 128, 32]


@pytest.mark.parametrize(
    ("vocab", "longest", "expected"),
    [(49152, 512, 256), (250880, 512, 64), (320, 512, 512), (320, 32, 32), (10**9, 512, 1)],
)
def test_rows_at_once_stay_within_their_memory(vocab: int, longest: int, expected: int) -> None:
    assert rows_at_once(vocab, longest) == expected
    assert expected == 1 or 4 * vocab * expected <= LOGITS_BYTES
