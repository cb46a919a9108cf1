"""Descriptions that no backend supports."""

from __future__ import annotations

from lite_runner.architectures import custom_network
from lite_runner.architectures.spec import Decoder


def undivided(model: Decoder) -> str:
    """Why tensor-parallel ranks cannot share a model; empty if they can."""
    if model.attention.latent is not None:
        return "has latent attention, which is not divided yet"
    if model.recurrent is not None or model.attention.gated:
        return "has recurrent layers, or gates of attention, which are not divided yet"
    experts = None if model.sparse is None else model.sparse.experts
    if not model.attention.qk_norm_by_head:
        return "norms queries and keys over all heads, which ranks share"
    if model.attention.qk_norm_apart or model.attention.sinks:
        return "has weights of each head besides matrices, which are not divided yet"
    if experts is not None and (experts.shared or (model.sparse and model.sparse.biased_down)):
        return "has experts with biases or a network beside them, which are not divided yet"
    return ""


def unsupported(model: Decoder, *, recurrent: bool = False) -> list[str]:
    """Why neither the MindSpore network nor the native kernels support a model; empty if they do,
    or if the model has a custom network. `recurrent`: of the native kernels alone, which know
    recurrent layers."""
    if custom_network(model) is not None:
        return []
    reasons, attentions = [], [block.attention for block in model.blocks]
    if not recurrent and model.recurrent is not None:
        reasons.append("recurrent layers are of backend=native")
    if not recurrent and any(one.gated for one in attentions):
        reasons.append("gates of attention are of backend=native")
    if not recurrent and any(one.chunk or one.temperature for one in attentions):
        reasons.append("attention in chunks, and its temperature, are of backend=native")
    if any(one.chunk and one.window for one in attentions):
        reasons.append("attention has chunks and windows")
    if len({block.recurrent for block in model.blocks} - {None}) > 1:
        reasons.append("recurrent layers differ")
    if any(block.recurrent and (block.parallel or block.norm is None) for block in model.blocks):
        reasons.append("a recurrent layer has no norm, or is parallel to the feed-forward")
    if any(one.gated and (one.latent or one.clip is not None) for one in attentions):
        reasons.append("gated attention is latent, or queries are clipped")
    # These are computed once per step and shared by all layers.
    if len({(one.heads, one.kv_heads, one.head_dim) for one in attentions}) > 1:
        reasons.append("heads differ between its layers")
    if len({one.alibi for one in attentions}) > 1:
        reasons.append("positions differ between its layers")
    if any(one.dims and one.scaling and one.scaling.type == "dynamic" for one in model.rotaries):
        reasons.append("dynamic scaling of RoPE needs heads that are rotated as a whole")
    for one in model.rotaries:
        pairs, scaling = (one.dims or model.head_dim) // 2, one.scaling
        if scaling is None or scaling.type != "longrope":
            continue
        counts = (len(scaling.short_factor), len(scaling.long_factor))
        if counts != (pairs, pairs):
            reasons.append(
                f"longrope has {counts[0]} short and {counts[1]} long factors, expected {pairs} of"
                " each: half of the dimensions that are rotated"
            )
    if len(model.rotaries) > 1 and any(one.dynamic for one in model.rotaries):
        reasons.append("rotary positions that depend on the length differ between its layers")
    two_dimensional = model.rotary is not None and model.rotary.two_dimensional
    if two_dimensional != (model.prefix is not None):
        reasons.append("two-dimensional positions and a prefix are only supported together")
    if two_dimensional and model.head_dim % 4:
        reasons.append(
            f"two-dimensional positions need a head_dim of a multiple of 4, got {model.head_dim}"
        )
    if any(block.norm is None and block.normed_residual is not None for block in model.blocks):
        reasons.append("a residual connection starts from normed values, but there is no norm")
    if any(one.parallel and one.normed_residual is not None for one in model.blocks):
        reasons.append("a parallel residual connection starts from normed values")
    if any(one.shared_norm and not one.parallel for one in model.blocks):
        reasons.append("attention and feed-forward share a norm one after the other")
    if any(one.parallel and one.feed_forward.experts is not None for one in model.blocks):
        reasons.append("experts have a parallel residual connection")
    if model.head_bias and (model.tie_word_embeddings or model.logits_scaling != 1):
        reasons.append("a head with a bias is tied, or its logits are scaled")
    if any(one.latent and one.head_dim % 2 for one in attentions):
        reasons.append("latent attention of an odd rank")
    if any(one.clip is not None and (one.latent or one.qk_norm_late) for one in attentions):
        reasons.append("queries are clipped before a norm, or of latent attention")
    if any(one.qk_norm_late and not one.qk_norm_by_head for one in attentions):
        reasons.append("queries and keys are normed over all heads behind RoPE")
    if model.rotary is not None and model.head_dim % 2:
        reasons.append(f"rotary positions need an even head_dim, got {model.head_dim}")
    return reasons
