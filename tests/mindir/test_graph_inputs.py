"""Gather indices and attention biases of the resizable graph, against plain loops."""

from __future__ import annotations

import numpy as np

from lite_runner.architectures.positions import MASKED
from lite_runner.architectures.spec import Decoder
from lite_runner.mindir.graph_inputs import Shape, fill_bias, gather_indices, not_resizable
from tests.each import each
from tests.models import reference_model
from tests.sizes import ModelConfig


def model(heads: int, kv: int) -> Decoder:
    return ModelConfig("llama", 96, 32, 2, heads, kv, 8, 48, 64, 1e-5, False)


# The others run in MindSpore Lite: tests/backends/lite.
REFUSED = {
    "chatglm_6b": "residual connections start from normed values",
    "gemma2": "norms follow attention and feed-forward",
    "gemma3": "rotary positions differ between its layers",
    "glm4": "norms follow attention and feed-forward",
    "gpt_neox": "attention and feed-forward are parallel",
    "granite": "embeddings, scores, residual connections or logits have multipliers",
    "mixtral": "it has experts",
    "olmo2": "queries and keys are normed over all heads together",
    "olmoe_clipped": "queries, keys and values are clipped",
    "qwen3_moe": "it has experts",
}


@each("case", REFUSED)
def test_refused_models(case: str) -> None:
    assert REFUSED[case] in not_resizable(reference_model(case))


@each(("rows", "tokens"), [(1, 5), (3, 1), (2, 3)])
@each(("heads", "kv"), [(4, 4), (6, 2), (3, 1)])
def test_rows_gather_each_head_and_bring_it_back(
    rows: int, tokens: int, heads: int, kv: int
) -> None:
    group, fused = heads // kv, heads + 2 * kv
    # Each row of the fused projection says whose it is: row, token, head.
    owners = [(b, s, h) for b in range(rows) for s in range(tokens) for h in range(fused)]
    found = gather_indices(model(heads, kv), Shape(rows, tokens, 7))
    assert found["q_rows"].shape == (rows, kv, tokens * group)
    for b, k in np.ndindex(rows, kv):
        for s in range(tokens):
            for g in range(group):
                assert owners[found["q_rows"][b, k, s * group + g]] == (b, s, k * group + g)
            assert owners[found["k_rows"][b, k, s]] == (b, s, heads + k)
            assert owners[found["v_rows"][b, k, s]] == (b, s, heads + kv + k)
    mixed = [owners[at] for at in found["q_rows"].reshape(-1)]
    merged = [mixed[at] for at in found["merge_rows"]]
    assert merged == [one for one in owners if one[2] < heads]
    assert list(found["last_rows"]) == [b * tokens + tokens - 1 for b in range(rows)]


@each("window", [None, 1, 3, 7, 100])
@each("alibi", [False, True])
def test_a_query_sees_what_came_before_it(alibi: bool, window: int | None) -> None:
    kv, group, tokens, past = 2, 3, 4, 9
    start = np.array([5, 0])
    slopes = np.arange(1, 7, dtype=np.float32).reshape(kv, group) if alibi else None
    bias = np.full((2, kv if alibi else 1, tokens * group, tokens + past), np.nan, np.float32)
    fill_bias(bias, start, tokens, slopes, window)
    for b, k, s, g, key in np.ndindex(2, bias.shape[1], tokens, group, tokens + past):
        position = start[b] + key if key < tokens else key - tokens
        seen = key <= s if key < tokens else position < start[b]
        got = bias[b, k, s * group + g, key]
        distance = position - (start[b] + s)
        if seen and (window is None or -distance < window):
            assert got == (slopes[k, g] * distance if slopes is not None else 0.0)
        else:
            assert got <= MASKED + 100
