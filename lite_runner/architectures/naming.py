"""Names, shapes and layouts of a decoder's tensors, by role, and their rows in fused ones.

MindFormers' names are canonical, or ours where MindFormers fuses tensors. A linear weight is
[out, in] unless its `Name` is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from lite_runner.architectures.spec import (
    Attention,
    Block,
    Decoder,
    Experts,
    Latent,
    Norm,
    Recurrent,
)
from lite_runner.records import dataclass

Role = Literal[
    "embedding",
    "positions",
    "embedding_norm",
    "join",
    "join_norm",
    "join_hidden_norm",
    "attention_norm",
    "query",
    "query_places",
    "key",
    "value",
    "query_norm",
    "key_norm",
    "latent_query",
    "latent_query_norm",
    "latent",
    "latent_norm",
    "latent_values",
    "sinks",
    "attention_out",
    "recurrent_in",
    "recurrent_gate",
    "recurrent_beta",
    "recurrent_decay",
    "recurrent_taps",
    "recurrent_log",
    "recurrent_rate",
    "recurrent_skip",
    "recurrent_gain",
    "recurrent_out",
    "attention_post_norm",
    "sum_norm",
    "feed_forward_norm",
    "gate",
    "up",
    "down",
    "router",
    "choice_bias",
    "expert_gate",
    "expert_up",
    "expert_down",
    "shared_router",
    "shared_gate",
    "shared_up",
    "shared_down",
    "feed_forward_post_norm",
    "out_norm",
    "router_scale",
    "expert_scales",
    "expert_norm",
    "expert_out_norm",
    "shared_out_norm",
    "side_table",
    "side_inward",
    "side_norm",
    "side_gate",
    "side_out",
    "side_out_norm",
    "block_scale",
    "norm",
    "head",
]
Part = Literal["weight", "bias"]  # gain and shift of a norm are its weight and bias
Layout = Literal["plain", "out_in", "in_out"]  # plain: not the weight of a linear layer
# Tensor-parallel split: a layer's outputs (keys and values by kv head), its inputs, or the
# vocabulary.
Split = Literal["none", "outputs", "key_heads", "inputs", "vocabulary"]


@dataclass(frozen=True)
class FusedExperts:
    """The experts of a layer in one tensor of Hugging Face, [experts, rows, in]; their biases are
    in the tensor of the name with _bias."""

    name: str  # {} is the layer index
    part: int  # index among gate and up ..
    parts: int
    by_turns: bool = False  # .. whose rows alternate
    transposed: bool = False  # [experts, in, rows]


@dataclass(frozen=True)
class Name:
    """Module names of one role, without .weight and .bias; {} is the layer index, and of experts a
    second {} the expert's."""

    mindformers: str  # the full tensor name for embedding and positions, which have no bias
    hugging_face: str
    # Index among q, k and v, or gate and up, where Hugging Face and GGUF fuse them.
    part: int | None = None
    transposed: bool = False  # MindFormers stores the matrix [in, out]
    # MindFormers' name where `mindformers` is ours: without a prefix, or of a part of a fused one.
    stored: str = ""
    stacked: str = ""  # MindFormers' module that has all experts of a layer, [experts, out, in]
    gguf: str = ""  # llama.cpp's name, where it is not that of the role
    last: str = ""  # MindFormers' module in the last layer, where it is another
    fused: FusedExperts | None = None


Names = Mapping[Role, Name]  # in the order of MindFormers' checkpoints

GGUF: Mapping[Role, str] = {  # llama.cpp's names, the same for every architecture
    "embedding": "token_embd",
    "positions": "position_embd",
    "embedding_norm": "token_embd_norm",
    "attention_norm": "blk.{}.attn_norm",
    "query": "blk.{}.attn_q",
    "key": "blk.{}.attn_k",
    "value": "blk.{}.attn_v",
    "query_norm": "blk.{}.attn_q_norm",
    "key_norm": "blk.{}.attn_k_norm",
    "sinks": "blk.{}.attn_sinks",
    "latent_query": "blk.{}.attn_q_a",
    "latent_query_norm": "blk.{}.attn_q_a_norm",
    "latent": "blk.{}.attn_kv_a_mqa",
    "latent_norm": "blk.{}.attn_kv_a_norm",
    "latent_values": "blk.{}.attn_kv_b",
    "attention_out": "blk.{}.attn_output",
    "recurrent_in": "blk.{}.ssm_in",
    "recurrent_gate": "blk.{}.attn_gate",
    "recurrent_beta": "blk.{}.ssm_beta",
    "recurrent_decay": "blk.{}.ssm_alpha",
    "recurrent_taps": "blk.{}.ssm_conv1d",
    "recurrent_log": "blk.{}.ssm_a.",
    "recurrent_rate": "blk.{}.ssm_dt.bias.",
    "recurrent_skip": "blk.{}.ssm_d.",
    "recurrent_gain": "blk.{}.ssm_norm",
    "recurrent_out": "blk.{}.ssm_out",
    "query_places": "",  # llama.cpp has none
    "sum_norm": "blk.{}.attn_output_norm",
    "out_norm": "blk.{}.layer_output_norm",
    "attention_post_norm": "blk.{}.post_attention_norm",
    "feed_forward_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
    "router": "blk.{}.ffn_gate_inp",
    "choice_bias": "blk.{}.exp_probs_b",
    "shared_router": "blk.{}.ffn_gate_inp_shexp",
    "shared_gate": "blk.{}.ffn_gate_shexp",
    "shared_up": "blk.{}.ffn_up_shexp",
    "shared_down": "blk.{}.ffn_down_shexp",
    "expert_gate": "blk.{}.ffn_gate_exps",  # all experts, [experts, out, in]
    "expert_up": "blk.{}.ffn_up_exps",
    "expert_down": "blk.{}.ffn_down_exps",
    "feed_forward_post_norm": "blk.{}.post_ffw_norm",
    "router_scale": "blk.{}.ffn_gate_inp.scale.",
    "expert_scales": "blk.{}.ffn_down_exps.scale.",
    "expert_norm": "blk.{}.pre_ffw_norm_2",
    "expert_out_norm": "blk.{}.post_ffw_norm_2",
    "shared_out_norm": "blk.{}.post_ffw_norm_1",
    "side_table": "per_layer_token_embd",
    "side_inward": "per_layer_model_proj",
    "side_norm": "per_layer_proj_norm",
    "side_gate": "blk.{}.inp_gate",
    "side_out": "blk.{}.proj",
    "side_out_norm": "blk.{}.post_norm",
    "block_scale": "blk.{}.layer_output_scale",
    "norm": "output_norm",
    "head": "output",
}
_QKV, _GATE_UP = "blk.{}.attn_qkv", "blk.{}.ffn_up"
_FUSED: Mapping[Role, str] = {
    **GGUF,
    **dict.fromkeys(("query", "key", "value"), _QKV),
    **dict.fromkeys(("gate", "up"), _GATE_UP),
}
HEAD = "lm_head"  # module of an untied head
_HEAD_NAME = Name(HEAD, HEAD)  # in Hugging Face and MindFormers, unless an architecture has another


@dataclass(frozen=True)
class Parameter:
    """One canonical tensor and its names in other formats."""

    name: str
    shape: tuple[int, ...]
    hugging_face: str  # as transformers saves a ...ForCausalLM
    gguf: str = ""  # llama.cpp's name; "": it does not support the architecture
    layout: Layout = "plain"
    part: int | None = None  # index among q, k and v, or gate and up, where the source fuses them
    rotary_heads: int = 0  # heads whose rows llama.cpp permutes for its rotary embedding
    role: Role | None = None  # None: of a custom network
    layer: int | None = None
    kind: Part = "weight"
    split: Split = "none"
    stored: str = ""  # name in MindFormers' checkpoints; "": the canonical one
    expert: int | None = None  # whose matrix it is; GGUF has those of a layer in one tensor
    stacked: str = ""  # MindFormers' tensor of all experts of a layer, [experts, *shape]
    fused: FusedExperts | None = None  # its layer is in the name

    @property
    def is_linear(self) -> bool:
        """True for a linear layer's matrix; the embedding is a table."""
        return self.layout != "plain"

    @property
    def transposed(self) -> bool:
        """True for a linear layer's matrix [in, out]."""
        return self.layout == "in_out"


def parameters_of(model: Decoder, names: Names) -> Iterator[Parameter]:
    """Every tensor of the description, an untied head last."""
    in_layers = [role for role in names if "{}" in names[role].mindformers]
    before = True
    for role, name in names.items():
        if role in in_layers:
            if before:
                for layer, block in enumerate(model.blocks):
                    for inner in in_layers:
                        one = names[inner]
                        if one.last and layer == model.num_layers - 1:
                            one = replace(one, mindformers=one.last)
                        yield from _of_block(model, block, layer, inner, one)
            before = False
        else:
            yield from _of_model(model, role, name)
    if not model.tie_word_embeddings:
        name, shape = names.get("head", _HEAD_NAME), (model.vocab_size, model.hidden_size)
        yield Parameter(
            f"{HEAD}.weight",
            shape,
            f"{name.hugging_face}.weight",
            f"{GGUF['head']}.weight",
            role="head",
            split="vocabulary",
            stored=name.stored and f"{name.stored}.weight",
        )
        if model.head_bias:
            yield Parameter(
                f"{HEAD}.bias",
                shape[:1],
                f"{name.hugging_face}.bias",
                f"{GGUF['head']}.bias",
                role="head",
                kind="bias",
                split="vocabulary",
                stored=name.stored and f"{name.stored}.bias",
            )


def _of_model(model: Decoder, role: Role, name: Name) -> Iterator[Parameter]:
    hidden = model.hidden_size
    if role == "embedding":
        yield _table(name, role, (model.vocab_size, hidden), "vocabulary")
    elif role == "positions" and model.learned_positions:
        rows = model.position_offset + model.seq_length
        yield _table(name, role, (rows, hidden), "none")
    elif role == "embedding_norm" and model.embedding_norm is not None:
        yield from _norm(model.embedding_norm, hidden, role, name, None)
    elif role == "norm" and model.norm is not None:
        yield from _norm(model.norm, hidden, role, name, None)
    elif model.side is not None and role.startswith("side_"):
        width = model.num_layers * model.side.width
        if role == "side_table":
            yield _table(name, role, (model.vocab_size, width), "none")
        elif role == "side_inward":
            yield _plain(name, None, role, (width, hidden))
        else:
            yield from _norm(model.side.norm, model.side.width, role, name, None)


def _of_block(
    model: Decoder, block: Block, layer: int, role: Role, name: Name
) -> Iterator[Parameter]:
    attention, feed_forward, hidden = block.attention, block.feed_forward, model.hidden_size
    if block.only not in (None, "feed_forward" if role in _OF_FEED_FORWARD else "mixer"):
        return
    if role in _OF_BLOCK_END:
        yield from _of_block_end(model, block, layer, role, name)
        return
    borrowed = attention.borrowed is not None and role in ("key", "value", "key_norm")
    if borrowed or (attention.values_are_keys and role == "value"):
        return
    if role in _OF_RECURRENT or (block.recurrent is not None and role in _OF_ATTENTION):
        if block.recurrent is not None and role in _OF_RECURRENT:
            yield from _of_recurrent(block.recurrent, hidden, layer, role, name)
        return
    queries = attention.heads * attention.head_dim
    keys = attention.kv_heads * attention.head_dim
    asked = queries * (2 if attention.gated else 1)
    linears: dict[Role, tuple[int, int, bool, Split]] = {  # out, in, bias, split
        "query": (asked, hidden, attention.qkv_bias, "outputs"),
        "key": (keys, hidden, attention.qkv_bias, "key_heads"),
        "value": (keys, hidden, attention.qkv_bias, "key_heads"),
        "attention_out": (hidden, queries, attention.out_bias, "inputs"),
    }
    if (latent := attention.latent) is not None:
        wide = attention.heads * latent.value
        linears = {"attention_out": (hidden, wide, attention.out_bias, "inputs")}
        if role in _OF_LATENT:
            yield from _of_latent(attention, latent, hidden, layer, role, name)
            return
    if feed_forward.experts is None:
        linears["up"] = (feed_forward.width, hidden, feed_forward.bias, "outputs")
        linears["down"] = (hidden, feed_forward.width, feed_forward.biased_down, "inputs")
        if feed_forward.gated:
            linears["gate"] = linears["up"]
    # One norm's weights for every head.
    by_head = attention.qk_norm_by_head and not attention.qk_norm_apart
    norms: dict[Role, tuple[Norm | None, int]] = {
        "attention_norm": (block.norm, hidden),
        "attention_post_norm": (block.post_norm, hidden),
        "feed_forward_norm": (None if block.shared_norm else block.norm, hidden),
        "feed_forward_post_norm": (block.post_norm, hidden),
        "sum_norm": (block.sum_norm, hidden),
        "out_norm": (block.out_norm, hidden),
        "query_norm": (attention.qk_norm, attention.head_dim if by_head else queries),
        "key_norm": (attention.qk_norm, attention.head_dim if by_head else keys),
    }
    if role in norms:
        norm, size = norms[role]
        if norm is not None:
            yield from _norm(norm, size, role, name, layer)
    elif feed_forward.experts is not None and role in _OF_EXPERTS:
        yield from _of_experts(block, feed_forward.experts, hidden, layer, role, name)
    elif attention.placed_query and role in ("query", "query_places"):
        table = role == "query_places"
        yield _plain(name, layer, role, (model.seq_length if table else queries, hidden))
        if attention.qkv_bias and not table:
            yield _plain(name, layer, role, (queries,), "bias")
    elif role == "sinks" and attention.sinks:
        yield _plain(name, layer, role, (attention.heads,))
    elif role in linears:
        out, inputs, bias, split = linears[role]
        # Of all layers, also of those without positions: llama.cpp's converter knows no layers.
        rotated = model.rotary is not None and role in ("query", "key")
        heads = (attention.heads if role == "query" else attention.kv_heads) if rotated else 0
        shape = (inputs, out) if name.transposed else (out, inputs)
        layout: Layout = "in_out" if name.transposed else "out_in"
        yield _parameter(name, layer, "weight", role, shape, layout, heads, split)
        if bias:  # of a row-parallel layer it is added once, after the all-reduce
            split = "none" if split == "inputs" else split
            yield _parameter(name, layer, "bias", role, (out,), "plain", heads, split)


_OF_BLOCK_END = ("side_gate", "side_out", "side_out_norm", "block_scale")


def _of_block_end(
    model: Decoder, block: Block, layer: int, role: Role, name: Name
) -> Iterator[Parameter]:
    hidden, side = model.hidden_size, model.side
    if role == "block_scale":
        if block.scaled:
            yield _plain(name, layer, role, (1,))
    elif side is not None and role == "side_out_norm":
        yield from _norm(side.norm, hidden, role, name, layer)
    elif side is not None:
        shape = (side.width, hidden) if role == "side_gate" else (hidden, side.width)
        yield _plain(name, layer, role, shape)


_OF_ATTENTION = ("query", "key", "value", "query_norm", "key_norm", "sinks", "attention_out")
_OF_RECURRENT = (
    *("recurrent_in", "recurrent_gate", "recurrent_beta", "recurrent_decay", "recurrent_taps"),
    *("recurrent_log", "recurrent_rate", "recurrent_skip", "recurrent_gain", "recurrent_out"),
)


def _of_recurrent(
    given: Recurrent, hidden: int, layer: int, role: Role, name: Name
) -> Iterator[Parameter]:
    linears: dict[Role, tuple[int, int, Split]] = {
        "recurrent_in": (given.channels, hidden, "outputs"),
        "recurrent_gate": (given.values, hidden, "outputs"),
        "recurrent_out": (hidden, given.values, "inputs"),
    }
    shapes: dict[Role, tuple[int, ...]] = {
        "recurrent_decay": (given.heads, hidden),
        "recurrent_taps": (given.channels, 1, given.kernel),
        "recurrent_log": (given.heads,),
        "recurrent_rate": (given.heads,),
    }
    if given.delta:
        shapes["recurrent_beta"] = (given.heads, hidden)
    else:
        shapes["recurrent_skip"] = (given.heads,)
    if role in linears:
        *shape, split = linears[role]
        yield _parameter(name, layer, "weight", role, tuple(shape), "out_in", 0, split)
        if given.bias:
            yield _parameter(name, layer, "bias", role, (shape[0],), "plain", 0, "none")
    elif role in shapes:
        yield _plain(name, layer, role, shapes[role])
        biased = {"recurrent_taps": given.conv_bias, "recurrent_decay": given.bias}
        if biased.get(role):
            yield _plain(name, layer, role, shapes[role][:1], "bias")
    elif role == "recurrent_gain":
        size = given.value_dim if given.delta else given.values
        yield _plain(name, layer, role, (size,))


_OF_LATENT = (
    *("latent_query", "latent_query_norm", "query", "latent", "latent_norm", "latent_values"),
)


def _of_latent(
    attention: Attention, given: Latent, hidden: int, layer: int, role: Role, name: Name
) -> Iterator[Parameter]:
    queries = attention.heads * (given.plain + given.rotated)
    values = attention.heads * (given.plain + given.value)
    shapes: dict[Role, tuple[int, ...]] = {
        "query": (queries, given.query_rank or hidden),
        "latent": (given.rank + given.rotated, hidden),
        "latent_norm": (given.rank,),
        "latent_values": (values, given.rank),
    }
    if given.query_rank is not None:
        shapes |= {
            "latent_query": (given.query_rank, hidden),
            "latent_query_norm": (given.query_rank,),
        }
    if role in shapes:
        yield _plain(name, layer, role, shapes[role])
        biased = attention.qkv_bias and role in ("latent", "latent_query")
        if biased:
            yield _plain(name, layer, role, shapes[role][:1], "bias")


_APART = ("router_scale", "expert_scales", "expert_norm", "expert_out_norm", "shared_out_norm")
_OF_EXPERTS = (
    *("router", "choice_bias", "expert_gate", "expert_up", "expert_down"),
    *("shared_router", "shared_gate", "shared_up", "shared_down", *_APART),
)
_OF_FEED_FORWARD = (
    *("feed_forward_norm", "gate", "up", "down", "feed_forward_post_norm", "out_norm"),
    *(*_OF_EXPERTS, *_OF_BLOCK_END),
)


def _of_experts(
    block: Block, experts: Experts, hidden: int, layer: int, role: Role, name: Name
) -> Iterator[Parameter]:
    given, gguf = block.feed_forward, f"{GGUF[role].format(layer)}.weight"
    if role in _APART:
        if experts.apart and role in ("router_scale", "expert_scales"):
            size = experts.count if role == "expert_scales" else hidden
            yield _plain(name, layer, role, (size,))
        elif experts.apart and block.norm is not None:
            yield from _norm(block.norm, hidden, role, name, layer)
        return
    if not given.gated and role in ("expert_gate", "shared_gate"):
        return
    if role == "router":
        yield _plain(name, layer, role, (experts.count, hidden))
        if experts.router_bias:
            yield _plain(name, layer, role, (experts.count,), "bias")
        return
    if role == "choice_bias":
        if experts.choice_bias:
            yield _plain(name, layer, role, (experts.count,), "bias")
        return
    down = role.endswith("_down")
    if role.startswith("shared_"):
        if role == "shared_router" and experts.shared_gate:
            yield _plain(name, layer, role, (1, hidden))
        elif role != "shared_router" and experts.shared:
            shape = (hidden, experts.shared) if down else (experts.shared, hidden)
            split: Split = "inputs" if down else "outputs"
            yield _parameter(name, layer, "weight", role, shape, "out_in", 0, split)
        return
    for expert in range(experts.count):
        yield Parameter(
            f"{name.mindformers.format(layer, expert)}.weight",
            (hidden, given.width) if down else (given.width, hidden),
            f"{name.hugging_face.format(layer, expert)}.weight",
            gguf,
            "out_in",
            role=role,
            layer=layer,
            split="inputs" if down else "outputs",
            expert=expert,
            stacked=f"{name.stacked.format(layer)}.weight",
            fused=name.fused and replace(name.fused, name=name.fused.name.format(layer)),
        )
        if given.biased_down if down else given.bias:
            yield Parameter(
                f"{name.mindformers.format(layer, expert)}.bias",
                (hidden if down else given.width,),
                f"{name.hugging_face.format(layer, expert)}.bias",
                f"{GGUF[role].format(layer)}.bias",
                role=role,
                layer=layer,
                kind="bias",
                split="none" if down else "outputs",
                expert=expert,
                stacked=f"{name.stacked.format(layer)}.bias",
                fused=name.fused
                and replace(name.fused, name=f"{name.fused.name.format(layer)}_bias"),
            )


def _plain(
    name: Name, layer: int | None, role: Role, shape: tuple[int, ...], kind: Part = "weight"
) -> Parameter:
    """A small tensor that is never quantized, and no target of adapters. A name with a dot at its
    end is that of the tensor itself."""
    every = (name.mindformers, name.hugging_face, name.gguf or GGUF[role])
    ours, theirs, gguf = (
        one[:-1] if one.endswith(".") else f"{one}.{kind}"
        for one in (_at(each, layer) for each in every)
    )
    return Parameter(ours, shape, theirs, gguf, role=role, layer=layer, kind=kind)


def _norm(norm: Norm, size: int, role: Role, name: Name, layer: int | None) -> Iterator[Parameter]:
    kinds: dict[Part, str] = {"weight": "weight"}
    if not norm.gain:
        kinds = {}
    elif norm.kind == "layer":
        kinds = {"weight": "gamma", "bias": "beta"} if norm.bias else {"weight": "gamma"}
    for kind, word in kinds.items():
        yield Parameter(
            f"{_at(name.mindformers, layer)}.{word}",
            (size,),
            f"{_at(name.hugging_face, layer)}.{kind}",
            _gguf(role, name, layer, kind),
            role=role,
            layer=layer,
            kind=kind,
            stored=name.stored and f"{_at(name.stored, layer)}.{word}",
        )


def _table(name: Name, role: Role, shape: tuple[int, ...], split: Split) -> Parameter:
    theirs, gguf = f"{name.hugging_face}.weight", _gguf(role, name, None, "weight")
    stored = name.stored
    return Parameter(name.mindformers, shape, theirs, gguf, role=role, split=split, stored=stored)


def _parameter(
    name: Name,
    layer: int,
    kind: Part,
    role: Role,
    shape: tuple[int, ...],
    layout: Layout,
    heads: int,
    split: Split,
) -> Parameter:
    return Parameter(
        f"{_at(name.mindformers, layer)}.{kind}",
        shape,
        f"{_at(name.hugging_face, layer)}.{kind}",
        _gguf(role, name, layer, kind),
        layout,
        name.part,
        heads,
        role,
        layer,
        kind,
        split,
        name.stored and f"{_at(name.stored, layer)}.{kind}",
    )


def _at(name: str, layer: int | None) -> str:
    return name if layer is None else name.format(layer)


def _gguf(role: Role, name: Name, layer: int | None, kind: Part) -> str:
    theirs = name.gguf or (GGUF if name.part is None else _FUSED)[role]
    return f"{_at(theirs, layer)}.{kind}"
