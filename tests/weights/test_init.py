"""Memory-mapped files, whose dropped pages are no longer resident, and lazy tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lite_runner.errors import ArtifactError
from lite_runner.weights import DType, LazyTensor, cast, drop_pages, map_file, transposed, widened

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


NOT_NUMBERS = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_values_that_another_type_cannot_hold(dtype: DType) -> None:
    def found(values: np.ndarray) -> np.ndarray:
        held = LazyTensor(values.shape, "F32", lambda: values)
        return widened(cast("x", held, dtype).read())

    largest = {"F16": 65504, "BF16": 2.0**128 - 2.0**120}[dtype]
    kept = np.array([0, -1, largest, -largest, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(found(kept), kept)
    assert np.isnan(found(NOT_NUMBERS.view(np.float32))).all()
    for value in (-3.4028235e38, 3.4028235e38):
        with pytest.raises(ArtifactError, match=f"x: .* too large for {dtype}") as caught:
            found(np.array([1, value], np.float32))
        assert "F32" in caught.value.hint
    if dtype == "F16":
        wide = np.array([0x7F80, 0x3F80], np.uint16)
        held = LazyTensor(wide.shape, "BF16", lambda: wide)
        assert cast("x", held, "F16").float32().tolist() == [np.inf, 1]


def test_a_transposed_tensor_that_cannot_be_sliced_is_read_once() -> None:
    values, reads = np.arange(1 << 12, dtype=np.float32).reshape(64, 64), []

    def read() -> np.ndarray:
        reads.append(1)
        return values

    turned = transposed(LazyTensor(values.shape, "F32", read))
    np.testing.assert_array_equal(np.concatenate(list(turned.chunks(1024))), values.T)
    assert len(reads) == 1
    sliced = transposed(LazyTensor(values.shape, "F32", read, lambda index: values[index]))
    np.testing.assert_array_equal(sliced.piece((slice(1, 3), slice(0, 5))), values.T[1:3, :5])
    assert len(reads) == 1
