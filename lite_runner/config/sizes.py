"""Sizes in a config: gigabytes, as MindSpore takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lite_runner.config.fields import Fault, fault, show

_GIGABYTES = re.compile(r"(?=.*[1-9])(\d+(?:\.\d+)?)GB")


def size_faults(key: str, text: str | None) -> Iterator[Fault]:
    """Whether a key holds a size, or null."""
    if text is not None and not _GIGABYTES.fullmatch(text):
        yield fault(key, f"{key}: got {show(text)}, expected gigabytes as 58GB or 3.5GB")


def bytes_of(text: str) -> int:
    """The bytes of a size without faults."""
    return round(float(text.removesuffix("GB")) * 10**9)
