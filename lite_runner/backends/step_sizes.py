"""Cache lengths, chunk lengths and token budgets of the backends."""

from __future__ import annotations

from lite_runner.architectures.spec import Decoder

SMALLEST_CACHE = 256  # positions; sizes are powers of two, for few graphs
LONGEST_CHUNK = 512  # tokens; longer ones are no faster
STEP_TOKENS = 2048  # prompt tokens per step, besides a new token of every slot
SCORE_BYTES = 64 << 20  # bound on the attention scores of a chunk
LOGITS_BYTES = 64 << 20  # bound on the logits of a step


def cache_length(wanted: int, longest: int) -> int:
    """Positions per cache slot: a power of two of at least `wanted`, bounded by `longest`."""
    size = SMALLEST_CACHE
    while size < wanted:
        size *= 2
    return max(wanted, min(size, longest))


def unchunked(model: Decoder, length: int) -> int:
    """Length of the prompts that must go through in one step; 0: prompts can be chunked."""
    return 0 if model.prefix is None else length


def step_capacity(slots: int, whole: int = 0) -> int:
    """Tokens per step of the native kernels: prompt tokens, or a new token of every slot; besides
    these a prompt of `whole` tokens."""
    return max(LONGEST_CHUNK, slots, slots - 1 + whole)


def step_budget(slots: int, chunk: int) -> int:
    """Token budget of a step if prompts are computed one by one, `chunk` tokens at a time: more
    would not be faster, and would delay the decodes."""
    return max(STEP_TOKENS, chunk) + slots


def chunk_length(heads: int, length: int, whole: int = 0) -> int:
    """Tokens per prefill chunk over `length` keys: a power of two, at least 32; or the `whole`
    prompt."""
    if whole:
        return whole
    fits = SCORE_BYTES // (4 * heads * length)
    return min(LONGEST_CHUNK, max(32, 1 << max(0, fits.bit_length() - 1)))


def rows_at_once(vocab: int, longest: int) -> int:
    """Tokens n whose logits [n, vocab] a step returns: a power of two, or `longest`."""
    fits = max(1, LOGITS_BYTES // (4 * vocab))
    return min(longest, 1 << (fits.bit_length() - 1))
