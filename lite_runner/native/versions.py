"""Versions of the packed format: which one introduced what."""

from __future__ import annotations

from collections.abc import Iterable

from lite_runner.native.layout import Block
from lite_runner.native.structs import Kind

# Format version that introduced each layer kind. The layout of a kind never changes.
_SINCE = {
    Kind.ATTENTION: 1,
    Kind.FEED_FORWARD: 1,
    Kind.EXTENDED_ATTENTION: 2,
    Kind.GENERAL_ATTENTION: 3,
    Kind.GENERAL_FEED_FORWARD: 3,
    Kind.EXPERTS: 3,
}
# And that introduced matrices of GGUF's blocks, and bfloat16 with such inputs.
SINCE_BLOCKS = 5
SINCE_BFLOAT16_INPUT = 6
UNREADABLE = (4,)  # had them with their words in another order
FORMAT = SINCE_BFLOAT16_INPUT  # newest version; the kernels read older ones too


def format_of(blocks: Iterable[Block]) -> int:
    """The oldest format version that supports these attention and feed-forward layers."""
    kinds = {Kind(int.from_bytes(block[:8].tobytes(), "little")) for block in blocks}
    return max(_SINCE[kind] for kind in kinds)
