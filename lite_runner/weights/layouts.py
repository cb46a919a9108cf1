"""The tensors of each family: MindFormers' names and shapes, and where other formats keep them.

MindFormers' unfused names are the canonical ones. A linear layer is held [out, in], except
`mapping` and `projection` of bloom and gpt2, which MindFormers holds [in, out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lite_runner.config.model import ModelConfig
from lite_runner.errors import ArtifactError

Layout = Literal["plain", "out_in", "in_out"]  # plain: not the weight of a linear layer


@dataclass(frozen=True)
class Parameter:
    """One canonical tensor, and the names of the tensors that hold it elsewhere."""

    name: str
    shape: tuple[int, ...]
    hugging_face: str  # as transformers saves a ...ForCausalLM
    gguf: str = ""  # as llama.cpp names it; "": it does not know the family
    layout: Layout = "plain"
    part: int | None = None  # 0, 1, 2: which of q, k, v, where the source fuses them
    rotary_heads: int = 0  # heads whose rows llama.cpp reorders for its rotary embedding


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """Every tensor of the model, in the order of its layers."""
    found = list(TENSORS[config.family](config))
    if not config.tie_word_embeddings:
        head = (config.vocab_size, config.hidden_size)
        found.append(Parameter("lm_head.weight", head, "lm_head.weight", "output.weight"))
    return tuple(found)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the model needs."""
    return {parameter.name: parameter.shape for parameter in parameters(config)}


def check_tensors(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Raise one ArtifactError with all missing, unexpected and wrongly shaped tensors."""
    missing = [f"{name} {_text(expected[name])}" for name in expected if name not in found]
    unexpected = [f"{name} {_text(found[name])}" for name in found if name not in expected]
    misshapen = [
        f"{name}: got {_text(found[name])}, expected {_text(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    faults = [
        f"{len(names)} {kind}: " + "; ".join(names[:5]) + (" ..." if len(names) > 5 else "")
        for kind, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of the wrong shape", misshapen),
        )
        if names
    ]
    if faults:
        raise ArtifactError(
            f"{where}: the tensors are not those of the model ({len(expected)} expected, "
            f"{len(found)} found)\n  - " + "\n  - ".join(faults),
            "check that model= and load_checkpoint= belong together, or use model=auto",
        )


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _llama(config: ModelConfig) -> Iterator[Parameter]:
    hidden, wide = config.hidden_size, config.intermediate_size
    embedding = (config.vocab_size, hidden)
    yield Parameter(
        "model.tok_embeddings.embedding_weight",
        embedding,
        "model.embed_tokens.weight",
        "token_embd.weight",
    )
    attention = (  # ours, Hugging Face, GGUF, heads, reordered by llama.cpp
        ("wq", "q_proj", "attn_q", config.num_heads, True),
        ("wk", "k_proj", "attn_k", config.n_kv_heads, True),
        ("wv", "v_proj", "attn_v", config.n_kv_heads, False),
    )
    feed_forward = (
        ("w1", "gate_proj", "ffn_gate", (wide, hidden)),
        ("w2", "down_proj", "ffn_down", (hidden, wide)),
        ("w3", "up_proj", "ffn_up", (wide, hidden)),
    )
    for index in range(config.num_layers):
        ours, theirs, gguf = f"model.layers.{index}.", f"model.layers.{index}.", f"blk.{index}."
        for name, hf_name, gguf_name, heads, rotary in attention:
            rows = heads * config.head_dim
            for kind, shape in (("weight", (rows, hidden)), ("bias", (rows,))):
                if kind == "bias" and not config.qkv_has_bias:
                    continue
                yield Parameter(
                    f"{ours}attention.{name}.{kind}",
                    shape,
                    f"{theirs}self_attn.{hf_name}.{kind}",
                    f"{gguf}{gguf_name}.{kind}",
                    "out_in" if kind == "weight" else "plain",
                    rotary_heads=heads if rotary else 0,
                )
        yield Parameter(
            f"{ours}attention.wo.weight",
            (hidden, config.num_heads * config.head_dim),
            f"{theirs}self_attn.o_proj.weight",
            f"{gguf}attn_output.weight",
            "out_in",
        )
        for name, hf_name, gguf_name, shape in feed_forward:
            yield Parameter(
                f"{ours}feed_forward.{name}.weight",
                shape,
                f"{theirs}mlp.{hf_name}.weight",
                f"{gguf}{gguf_name}.weight",
                "out_in",
            )
        for name, hf_name, gguf_name in (
            ("attention_norm", "input_layernorm", "attn_norm"),
            ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
        ):
            yield Parameter(
                f"{ours}{name}.weight",
                (hidden,),
                f"{theirs}{hf_name}.weight",
                f"{gguf}{gguf_name}.weight",
            )
    yield Parameter("model.norm_out.weight", (hidden,), "model.norm.weight", "output_norm.weight")


def _bloom(config: ModelConfig) -> Iterator[Parameter]:
    hidden = config.hidden_size
    yield Parameter(
        "embedding.word_embedding.embedding_table",
        (config.vocab_size, hidden),
        "transformer.word_embeddings.weight",
        "token_embd.weight",
    )
    yield from _layer_norm(
        "embedding.norm", "transformer.word_embeddings_layernorm", "token_embd_norm", hidden
    )
    for index in range(config.num_layers):
        ours, theirs, gguf = f"blocks.{index}.", f"transformer.h.{index}.", f"blk.{index}."
        yield from _classic_block(
            config,
            ours,
            gguf,
            norms=(f"{theirs}input_layernorm", f"{theirs}post_attention_layernorm"),
            fused=f"{theirs}self_attention.query_key_value",
            projection=f"{theirs}self_attention.dense",
            mapping=f"{theirs}mlp.dense_h_to_4h",
            contraction=f"{theirs}mlp.dense_4h_to_h",
        )
    yield from _layer_norm("ln_f", "transformer.ln_f", "output_norm", hidden)


def _gpt2(config: ModelConfig) -> Iterator[Parameter]:
    hidden = config.hidden_size
    for name, hf_name, gguf_name, rows in (
        ("word_embedding", "wte", "token_embd", config.vocab_size),
        ("position_embedding", "wpe", "position_embd", config.seq_length),
    ):
        yield Parameter(
            f"backbone.embedding.{name}.embedding_table",
            (rows, hidden),
            f"transformer.{hf_name}.weight",
            f"{gguf_name}.weight",
        )
    for index in range(config.num_layers):
        ours, theirs = f"backbone.blocks.{index}.", f"transformer.h.{index}."
        yield from _classic_block(
            config,
            ours,
            f"blk.{index}.",
            norms=(f"{theirs}ln_1", f"{theirs}ln_2"),
            fused=f"{theirs}attn.c_attn",
            projection=f"{theirs}attn.c_proj",
            mapping=f"{theirs}mlp.c_fc",
            contraction=f"{theirs}mlp.c_proj",
        )
    yield from _layer_norm("backbone.layernorm", "transformer.ln_f", "output_norm", hidden)


def _layer_norm(ours: str, theirs: str, gguf: str, hidden: int) -> Iterator[Parameter]:
    yield Parameter(f"{ours}.gamma", (hidden,), f"{theirs}.weight", f"{gguf}.weight")
    yield Parameter(f"{ours}.beta", (hidden,), f"{theirs}.bias", f"{gguf}.bias")


def _classic_block(
    config: ModelConfig,
    ours: str,
    gguf: str,
    *,
    norms: tuple[str, str],
    fused: str,
    projection: str,
    mapping: str,
    contraction: str,
) -> Iterator[Parameter]:
    """A block of bloom or gpt2: MindFormers gives both the same names."""
    hidden, wide = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    yield from _layer_norm(f"{ours}layernorm1", norms[0], f"{gguf}attn_norm", hidden)
    for part in range(3):
        name, source = f"{ours}attention.dense{part + 1}", f"{gguf}attn_qkv"
        yield Parameter(
            f"{name}.weight", (heads, hidden), f"{fused}.weight", f"{source}.weight", "out_in", part
        )
        yield Parameter(f"{name}.bias", (heads,), f"{fused}.bias", f"{source}.bias", part=part)
    linears = (  # name, Hugging Face, GGUF, in, out
        ("attention.projection", projection, "attn_output", heads, hidden),
        ("output.mapping", mapping, "ffn_up", hidden, wide),
        ("output.projection", contraction, "ffn_down", wide, hidden),
    )
    for name, theirs, gguf_name, width_in, width_out in linears:
        yield Parameter(
            f"{ours}{name}.weight",
            (width_in, width_out),
            f"{theirs}.weight",
            f"{gguf}{gguf_name}.weight",
            "in_out",
        )
        yield Parameter(
            f"{ours}{name}.bias", (width_out,), f"{theirs}.bias", f"{gguf}{gguf_name}.bias"
        )
    yield from _layer_norm(f"{ours}layernorm2", norms[1], f"{gguf}ffn_norm", hidden)


# By family, all but a head of its own; lite_runner.register adds to it.
TENSORS: dict[str, Callable[[ModelConfig], Iterable[Parameter]]] = {
    "bloom": _bloom,
    "llama": _llama,
    "gpt2": _gpt2,
}
