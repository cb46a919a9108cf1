"""What nothing here computes, though a description can say it."""

from __future__ import annotations

from lite_runner.architectures import own_network
from lite_runner.architectures.spec import Decoder


def unsupported(model: Decoder) -> list[str]:
    """Why neither MindSpore's network nor our own operators can compute a model; nothing where they
    can, or where the model has a network of its own."""
    if own_network(model) is not None:
        return []
    reasons, attentions = [], [block.attention for block in model.blocks]
    # What follows from these is worked out once a step, for all layers.
    if len({(one.heads, one.kv_heads, one.head_dim) for one in attentions}) > 1:
        reasons.append("heads differ between its layers")
    if len({(one.rotary, one.alibi) for one in attentions}) > 1:
        reasons.append("positions differ between its layers")
    if model.rotary is not None and model.head_dim % 2:
        reasons.append(f"rotary positions need an even head_dim, got {model.head_dim}")
    return reasons
