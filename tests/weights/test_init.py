"""Memory-mapped files: dropped pages are no longer resident."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.weights import drop_pages, map_file

PAGE = 4096
STARTS = 16  # that a mapping can have within the 64 KiB that the kernel looks at


@pytest.mark.parametrize("pages", [15, 33, 257, 2305])
def test_dropped_pages_are_gone_wherever_the_file_is_mapped(
    pages: int, tmp_path: Path, resident: Callable[[Path], int]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(pages * PAGE))
    # Each mapping lies below the one before it: an odd number of pages tries every start.
    mappings = [map_file(path) for _ in range(STARTS)]
    for mapping in mappings:
        for first in range(0, mapping.size, 5 * PAGE):
            read = mapping[first : first + PAGE // 2]
            assert read.sum() == 0
            assert first or resident(path) > 0
            drop_pages(read)
        assert resident(path) == 0
