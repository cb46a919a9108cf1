"""Native kernels on ranks that share a model: against transformers' logits, and one process's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner.config.sections import Ranks
from tests.backends.native import ranks as native_ranks
from tests.backends.native.ranks import Case
from tests.paths import REFERENCE

REFERENCES = [
    Case("llama", 4),  # two key/value heads for four ranks; a head of its own
    Case("bloom", 4, vocab_parallel=False),
    Case("gpt2_inner", 4),
    Case("qwen2", vocab_parallel=False),
    *map(Case, ("bloom_6_heads", "qwen3", "qwen2_window", "granite", "smollm3", "chatglm")),
    *map(Case, ("glm4", "gemma2", "gemma3", "phi3", "phi3_long", "gpt_neox", "starcoder2_exact")),
    *map(Case, ("chatglm_6b", "qwen3_moe", "mixtral", "llama_biases")),
]
OTHERS = [
    Case("llama", quant="a16w8"),
    Case("qwen3", quant="a16w4"),
    Case("gpt2", quant="a16w8"),  # matrices [in, out]
    Case("mixtral", quant="a16w4"),
    Case("wide", quant="a16"),  # ranks share a block
    Case("wide", quant="a16", adapters=True),
    Case("llama", adapters=True),
    Case("gpt2", adapters=True),
    Case("bloom", vocab_parallel=False, adapters=True),
    Case("qwen3", 4, quant="a16w8", adapters=True, elsewhere=True),  # from here on all are
    Case("wide", quant="a16", elsewhere=True),
]
TOLERANCE = 1e-5
# Inputs of integer matrices are rounded, with one scale for numbers of one rank.
INTEGER_TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def computed() -> list[list[NDArray]]:
    """The logits of each case by rank; one launch for all."""
    every = [*REFERENCES, *OTHERS]
    return native_ranks.run_ranks(4, [(native_ranks.compute, case) for case in every])


def test_logits_match_transformers_and_are_the_same_on_every_rank(
    computed: list[list[NDArray]],
) -> None:
    for case, found in zip(REFERENCES, computed, strict=False):
        expected = np.load(REFERENCE / case.name / "expected.npz")["logits"]
        for logits in found:
            assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max(), case
            assert logits.tobytes() == found[0].tobytes(), case


def test_quantized_weights_and_adapters_match_one_process(computed: list[list[NDArray]]) -> None:
    for case, found in zip(OTHERS, computed[len(REFERENCES) :], strict=True):
        alone = native_ranks.backend_of(case, Ranks())
        expected = native_ranks.logits_of(alone, *native_ranks.prompts_of(case))
        alone.close()
        limit = TOLERANCE if case.quant == "none" else INTEGER_TOLERANCE
        for logits in found:
            assert np.abs(logits - expected).max() <= limit * np.abs(expected).max(), case
            assert logits.tobytes() == found[0].tobytes(), case


def test_a_rank_whose_peer_is_gone_ends() -> None:
    ((first, second),) = native_ranks.run_ranks(2, [(native_ranks.leave, Case("llama"))])
    assert second == "left"
    assert "part 1 of the model has ended" in first
