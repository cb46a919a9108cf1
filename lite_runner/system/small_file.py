"""Bounded reads of small user files."""

from __future__ import annotations

import errno
from pathlib import Path

MAX_FILE_BYTES = 1 << 20


def read_small(path: Path, what: str) -> bytes:
    """The bytes of a file of at most MAX_FILE_BYTES.

    Raises OSError, whose strerror says why: missing, unreadable, too large to be `what`; and
    ValueError for a path with a NUL.
    """
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes; not {what}")
    return data
