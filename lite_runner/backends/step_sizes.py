"""How long caches and chunks are, whichever backend holds them."""

from __future__ import annotations

SMALLEST_CACHE = 256  # positions; sizes are powers of two, so that few graphs are made
LONGEST_CHUNK = 512  # tokens; longer ones are no faster
STEP_TOKENS = 2048  # of prompts in a step, beside the new token of every slot
SCORE_BYTES = 64 << 20  # a chunk of a prompt is as long as keeps its attention scores below


def cache_length(wanted: int, longest: int) -> int:
    """Positions of a cache slot: a power of two of at least `wanted`, within the model's own."""
    size = SMALLEST_CACHE
    while size < wanted:
        size *= 2
    return max(wanted, min(size, longest))


def step_capacity(slots: int) -> int:
    """Tokens that a step of our own operators takes: of prompts, or a new one of every slot."""
    return max(LONGEST_CHUNK, slots)


def step_budget(slots: int, chunk: int) -> int:
    """Tokens that a step takes at best where each prompt is computed by itself, `chunk` tokens at
    a time: of more the machine makes nothing, and those who decode wait."""
    return max(STEP_TOKENS, chunk) + slots


def chunk_length(heads: int, length: int) -> int:
    """Tokens of a prompt computed at once over `length` keys: a power of two, at least 32."""
    fits = SCORE_BYTES // (4 * heads * length)
    return min(LONGEST_CHUNK, max(32, 1 << max(0, fits.bit_length() - 1)))
