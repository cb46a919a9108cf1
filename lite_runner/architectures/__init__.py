"""Model architectures, one file each; everything else is derived from them. NumPy only.

An architecture is imported when a model, a file or a message needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import field
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from lite_runner.architectures.fields import MAX_LAYERS, Fields
from lite_runner.architectures.naming import Names, Part, Role, parameters_of
from lite_runner.architectures.naming import Parameter as Parameter
from lite_runner.architectures.settings import (
    AutoSettings,
    DecoderSettings,
    Settings,
    Translation,
    token_ids,
)
from lite_runner.architectures.spec import Decoder
from lite_runner.records import Variants, dataclass

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# A yaml of MindFormers, and the settings of the model of conf/ that it is merged over.
Translate = Callable[[Mapping[str, Any], Mapping[str, Any], Translation], None]
Rows: TypeAlias = "slice | NDArray[np.int64]"  # row i of a tensor is row rows[i] of the stored one
StoredRows: TypeAlias = "Callable[[Parameter, Decoder], Rows | None]"  # None: stored as it is


def apart(parameter: Parameter, model: Decoder) -> None:
    """Each tensor by itself, as it is."""


def stacked(parameter: Parameter, model: Decoder) -> slice | None:
    """All of q, then all of k, then all of v; all of gate, then all of up."""
    if parameter.part is None:
        return None
    if parameter.role in ("gate", "up"):
        sizes = [model.intermediate_size] * 2
    else:
        sizes = [heads * model.head_dim for heads in (model.num_heads, *[model.n_kv_heads] * 2)]
    start = sum(sizes[: parameter.part])
    return slice(start, start + sizes[parameter.part])


@dataclass(frozen=True)
class MindFormers:
    """MindFormers' names and settings of an architecture."""

    section: type[DecoderSettings]  # model_config
    network: str  # type in arch
    inputs: str  # input style of its exported graphs: see mindir/graph_inputs.py
    settings: Callable[[Decoder], dict[str, Any]]  # of model_config, besides the shared ones
    read: Callable[[Mapping[str, Any]], Decoder]  # from the full model_config
    # Sizes that are read from a graph, besides the shared ones: its name -> the name of Decoder.
    sizes: Mapping[str, str] = field(
        default_factory=lambda: {name: name for name in ("n_kv_heads", "intermediate_size")}
    )
    model: str = ""  # of conf/model, to start from for a model of another name
    also: tuple[str, ...] = ()  # other networks of MindFormers, which compute the same
    hidden_act: tuple[str, ...] = ()  # that such models are trained with, by MindFormers' names
    unread: frozenset[str] = frozenset()  # settings that this class takes and never reads
    # Settings of the yaml that `translate` makes others of.
    translated: frozenset[str] = frozenset()
    translate: Translate = lambda given, defaults, result: None
    # True if a yaml that names another network is of this one.
    claims: Callable[[Mapping[str, Any]], bool] = lambda raw: False

    @property
    def config(self) -> str:
        """The type in model_config."""
        return self.section.type


@dataclass(frozen=True)
class GGUF:
    """llama.cpp's metadata keys and weight layout of an architecture."""

    # config.json key -> metadata key without the architecture prefix.
    keys: Mapping[str, str]
    permuted: bool = False  # rows of q and k are permuted for llama.cpp's rotary embedding
    # Flag of config.json -> the tensor that only a file with that flag has.
    flags: Mapping[str, str] = field(default_factory=dict)
    # (tensor names, fields so far, those of `keys` too) -> other fields inferred from them.
    infer: Callable[[Container[str], Mapping[str, Any]], dict[str, Any]] = lambda tensors, given: {}
    name: str = ""  # general.architecture; "": that of the architecture
    also: tuple[str, ...] = ()  # other names of it
    written: bool = True  # False: such files are read alone
    # Order of a tensor's rows in its part of the file, where fused parts follow each other.
    rows: StoredRows = apart
    # Order of its rows in the whole fused tensor, where files interleave the parts.
    fused_rows: StoredRows = apart
    columns: StoredRows = apart  # and where its columns are, blocks of which are then floats
    # Metadata without the architecture prefix that no field of config.json is.
    more: Callable[[Decoder], dict[str, Any]] = lambda model: {}

    def inferred(self, tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of config.json by the names of a file's tensors and the fields `given` so far."""
        flags = {key: name in tensors for key, name in self.flags.items()}
        return flags | self.infer(tensors, given)


@dataclass(frozen=True)
class CustomNetwork:
    """A network given to `lite_runner.register`, not built from a description."""

    network: Callable[..., Any]  # (model, weights by name, BuildOptions) -> a MindSpore Cell
    tensors: Callable[[Decoder], Iterable[Parameter]]  # all but an untied head
    code: str  # sha256 of its source: part of the keys of caches that depend on it


@dataclass(frozen=True, eq=False)
class Architecture:
    """One module of this package, or an architecture given to `lite_runner.register`."""

    name: str  # model_type in config.json and general.architecture in GGUF
    read: Callable[[Fields], Decoder]  # of config.json
    names: Names = field(default_factory=dict)
    # Architecture-specific part of config.json; None: transformers has no such model.
    write: Callable[[Decoder], dict[str, Any]] | None = None
    mindformers: MindFormers | None = None
    gguf: GGUF | None = None
    # Fields of config.json besides NO_EFFECT that change nothing, with the reason.
    no_effect: Mapping[str, str] = field(default_factory=dict)
    conv1d: bool = False  # transformers stores its linear layers as Conv1D, [in, out]
    stored_rows: StoredRows = stacked  # of tensors that checkpoints fuse or reorder
    always_tied: bool = False  # in MindFormers the head is always the embedding
    text_of: str = ""  # a model with other parts, of which this architecture's text model is read
    # Matrices of files whose embedding and head are narrower: behind the one, and before the other.
    projections: tuple[str, str] | None = None
    norms_less_one: bool = False  # transformers stores the weights of norms less 1
    next_token_layers: bool = False  # files have layers behind the model's that predict further
    custom: CustomNetwork | None = None
    # The setting that transformers' model of that name computes differently; its config.json is
    # ours then.
    not_theirs: Callable[[Decoder], str | None] = lambda model: None
    layers_differ: bool = False  # config.json may have other sizes of single layers
    renamed: Callable[[Decoder], Names] = lambda model: {}  # names that a model has others of
    # In transformers' files a norm with weights of each head is a tensor of each, NAME.0.weight ...
    tensor_by_head: bool = False
    # Changes to texts before sentencepiece sees them, which its files do not tell: a piece in
    # place of line breaks, or split into words by jieba.
    spelling: Literal["breaks", "words"] | None = None


_SHARED = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def shared_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The MindFormers settings whose names equal fields of Decoder, for every architecture."""
    return {name: given[name] for name in _SHARED}


def shared_fields(fields: Fields) -> dict[str, Any]:
    """The same from a config.json that has MindFormers' names."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_heads")
    fields.head_dim(hidden, heads)
    fields.neutral(tie_word_embeddings=True)
    vocab_size = fields.integer("vocab_size")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_layers": fields.integer("num_layers", most=MAX_LAYERS),
        "num_heads": heads,
        "seq_length": fields.integer("seq_length"),
        "tie_word_embeddings": True,
        **fields.tokens(vocab_size),
    }


def shared_names(model: Decoder) -> dict[str, Any]:
    """The inverse of `shared_fields`."""
    return {name: getattr(model, name) for name in _SHARED[1:5]}


# model_type -> the module that it is in; messages list them in this order.
_MODULES = {
    "bloom": "bloom",
    "llama": "llama",
    "qwen2": "qwen2",
    "gpt2": "gpt2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "chatglm_6b": "chatglm_6b",
    "chatglm": "chatglm",
    "glm": "glm",
    "glm4": "glm",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4": "gemma4",
    "qwen3_moe": "qwen3_moe",
    "mixtral": "mixtral",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "gpt_neox": "gpt_neox",
    "qwen2_moe": "qwen2_moe",
    "glm4_moe": "glm4_moe",
    "gpt_oss": "gpt_oss",
    "olmoe": "olmoe",
    "granitemoe": "granite_moe",
    "phi": "phi",
    "stablelm": "stablelm",
    "cohere": "cohere",
    "cohere2": "cohere",
    "gemma": "gemma",
    "olmo3": "olmo3",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan",
    "nemotron": "nemotron",
    "nemotron_h": "nemotron_h",
    "opt": "opt",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "baichuan": "baichuan",
    "falcon": "falcon",
    "hunyuan_v1_moe": "hunyuan",
    "internlm": "internlm",
    "internlm2": "internlm",
    "minicpm": "minicpm",
    "mpt": "mpt",
    "qwen": "qwen",
    "qwen3_next": "qwen3_next",
    "granitemoehybrid": "granite_hybrid",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "telechat": "telechat",
    "telechat3": "telechat",
    "iflytekspark": "iflytekspark",
    "pangualpha": "pangualpha",
    "llama4_text": "llama4",
    "llama4": "llama4",
}
# MindFormers' config class -> the architecture that has it; where several do (Llama's, Qwen2's,
# Mistral's), the one whose reader tells them apart.
_CONFIG_CLASSES = {
    "BloomConfig": "bloom",
    "LlamaConfig": "llama",
    "GPT2Config": "gpt2",
    "Qwen3Config": "qwen3",
    "Olmo2Config": "olmo2",
    "GraniteConfig": "granite",
    "SmolLM3Config": "smollm3",
    "GLMConfig": "chatglm_6b",
    "ChatGLM2Config": "chatglm",
    "GlmConfig": "glm",
    "Glm4Config": "glm4",
    "Gemma2Config": "gemma2",
    "Gemma3TextConfig": "gemma3_text",
    "Qwen3MoeConfig": "qwen3_moe",
    "MixtralConfig": "mixtral",
    "Phi3Config": "phi3",
    "Starcoder2Config": "starcoder2",
    "GPTNeoXConfig": "gpt_neox",
    "Qwen2MoeConfig": "qwen2_moe",
    "DeepseekV2Config": "deepseek_v2",
    "DeepseekV3Config": "deepseek_v3",
    "BaichuanConfig": "baichuan",
    "InternLMConfig": "internlm",
    "InternLM2Config": "internlm2",
    "QwenConfig": "qwen",
    "TelechatConfig": "telechat",
    "IFlytekSparkConfig": "iflytekspark",
    "PanguAlphaConfig": "pangualpha",
}


class _Architectures(MutableMapping[str, Architecture]):
    """Architectures by model_type; those of this package are imported when they are read."""

    def __init__(self) -> None:
        self._found: dict[str, Architecture | None] = dict.fromkeys(_MODULES)

    def __getitem__(self, name: str) -> Architecture:
        one = self._found[name]
        if one is None:
            module = import_module(f"{__name__}.{_MODULES[name]}")
            every = (one for one in vars(module).values() if isinstance(one, Architecture))
            one = self._found[name] = next(one for one in every if one.name == name)
        return one

    def __setitem__(self, name: str, one: Architecture) -> None:
        self._found[name] = one

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


# lite_runner.register adds to it.
KNOWN = _Architectures()


def architecture_of(model: Decoder) -> Architecture:
    return KNOWN[model.architecture]


def named_in(raw: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a config.json; None: it is unknown."""
    name = raw.get("model_type")
    # ChatGLM-6B has the model_type of its successors, of which none has these fields.
    if name == "chatglm" and ("inner_hidden_size" in raw or "position_encoding_2d" in raw):
        name = "chatglm_6b"
    return KNOWN.get(name) if isinstance(name, str) else None


def of_gguf(name: object) -> tuple[Architecture, GGUF] | None:
    """The architecture with this general.architecture, most of which are called as in config.json;
    None: there is none."""
    for names in ((name,) if isinstance(name, str) and name in KNOWN else (), KNOWN):
        for one in map(KNOWN.__getitem__, names):
            if one.gguf is not None and name in (one.gguf.name or one.name, *one.gguf.also):
                return one, one.gguf
    return None


def _settings(config: str) -> type[Settings]:
    """The settings of a config class of MindFormers, or of model=auto."""
    found = of_mindformers(config)
    return AutoSettings if found is None else found.section


ModelSettings: TypeAlias = Annotated[
    DecoderSettings | AutoSettings, Variants((*_CONFIG_CLASSES, "auto"), _settings)
]


@cache
def networks() -> dict[str, str]:
    """The models of conf/ to start from, by MindFormers' network, for a model of another name."""
    return {one.network: one.model for one in _every_mindformers()}


def _every_mindformers() -> list[MindFormers]:
    return [found for config in reversed(_CONFIG_CLASSES) if (found := of_mindformers(config))]


def of_mindformers(config: object) -> MindFormers | None:
    """The architecture with this config class of MindFormers; None: there is none."""
    name = _CONFIG_CLASSES.get(config) if isinstance(config, str) else None
    return None if name is None else KNOWN[name].mindformers


def modules_of(config: object) -> list[str]:
    """MindFormers' modules of the architecture with this config class."""
    name = _CONFIG_CLASSES.get(config) if isinstance(config, str) else None
    return [] if name is None else [one.mindformers for one in KNOWN[name].names.values()]


def of_yaml(raw: Mapping[str, Any], network: Any) -> MindFormers | None:
    """The architecture of a yaml of MindFormers that names a `network`; None: it is unknown."""
    if not raw:
        return None
    every = _every_mindformers()
    for one in every:
        if one.claims(raw):
            return one
    return next((one for one in every if network in (one.network, *one.also)), None)


def model_of(settings: DecoderSettings | AutoSettings) -> Decoder | None:
    """The model that settings describe; None for model=auto, whose checkpoint has the sizes."""
    if isinstance(settings, AutoSettings):
        return None
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    ids = token_ids(settings.eos_token_id)
    theirs = of_mindformers(settings.type)
    assert theirs is not None
    return theirs.read(given | {"eos_token_id": ids})


def custom_network(model: Decoder) -> CustomNetwork | None:
    """The user's registered network; None: the network is built from the description."""
    return architecture_of(model).custom


def network_code(model: Decoder) -> str | None:
    """Cache key of a custom network: see CustomNetwork.code."""
    custom = custom_network(model)
    return None if custom is None else custom.code


def can_untie_head(model: Decoder) -> bool:
    """True where the architecture supports an untied output head."""
    architecture = architecture_of(model)
    return architecture.custom is None and not architecture.always_tied


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Its rows in the tensor that checkpoints store; None: it is stored as it is."""
    return architecture_of(model).stored_rows(parameter, model)


def parameters(model: Decoder) -> tuple[Parameter, ...]:
    """Every tensor of the model, in layer order."""
    return _parameters(architecture_of(model), model)


@lru_cache(maxsize=16)
def _parameters(architecture: Architecture, model: Decoder) -> tuple[Parameter, ...]:
    custom = architecture.custom
    if custom is None:
        table = parameters_of(model, {**architecture.names, **architecture.renamed(model)})
        return tuple(table if model.joins is None else _of_next_token_layer(model, table))
    head = [one for one in parameters_of(model, {}) if one.role == "head"]
    return (*custom.tensors(model), *head)


def _of_next_token_layer(model: Decoder, table: Iterable[Parameter]) -> Iterator[Parameter]:
    """The tensors of a layer for multi-token prediction, by those that a model of its block
    has: see next_token.py."""
    hidden, name = model.hidden_size, "model.eh_proj.weight"
    shape = (hidden, 2 * hidden)
    yield Parameter(name, shape, name, "nextn.eh_proj.weight", "out_in", role="join")
    norms: tuple[tuple[Role, str], ...] = ("join_norm", "enorm"), ("join_hidden_norm", "hnorm")
    for role, own in norms:
        name = f"model.{own}.weight"
        yield Parameter(name, (hidden,), name, f"nextn.{own}.weight", role=role)
    yield from (one for one in table if one.role != "embedding")


ParameterKey: TypeAlias = tuple[Role | None, int | None, Part]  # role, layer, weight or bias


def by_role(model: Decoder) -> dict[ParameterKey, Parameter]:
    """Every tensor of a described model but its experts' by role, layer and kind."""
    table = parameters(model)
    return {(one.role, one.layer, one.kind): one for one in table if one.expert is None}


def by_expert(
    model: Decoder, kind: Part = "weight"
) -> dict[tuple[Role | None, int | None], list[Parameter]]:
    """The experts' matrices of each role and layer, or biases, in the order of the experts."""
    found: dict[tuple[Role | None, int | None], list[Parameter]] = {}
    for one in parameters(model):
        if one.expert is not None and one.kind == kind:
            found.setdefault((one.role, one.layer), []).append(one)
    return found


def unshardable(model: Decoder) -> str:
    """The reason why tensor-parallel ranks cannot share a model; empty if they can."""
    if model.learned_keys:
        return "has learned keys, which are not sharded yet"
    if model.attention.latent is not None:
        return "has latent attention, which is not divided yet"
    for part in native_parts(model):
        return f"has {part.rstrip(',')}, which are not sharded yet"
    experts = None if model.sparse is None else model.sparse.experts
    if not model.attention.qk_norm_by_head:
        return "normalizes queries and keys over all heads, which ranks divide"
    if model.attention.qk_norm_apart or model.attention.sinks:
        return "has weights of each head besides matrices, which are not sharded yet"
    if experts is not None and (experts.shared or (model.sparse and model.sparse.biased_down)):
        return "has experts with biases or a network beside them, which are not sharded yet"
    return ""


def native_parts(model: Decoder) -> list[str]:
    """Parts of a model that the native kernels alone compute."""
    attentions = [block.attention for block in model.blocks]
    experts = None if model.sparse is None else model.sparse.experts
    there = {
        "recurrent layers": model.recurrent is not None,
        "gates of attention": any(one.gated for one in attentions),
        "learned keys in front of each sequence": bool(model.learned_keys),
        "attention in chunks, and its temperature,": any(
            one.chunk or one.temperature for one in attentions
        ),
        "heads that differ between layers": model.heads_differ,
        "keys that layers share": any(one.borrowed is not None for one in attentions),
        "norms of values": any(one.value_norm or one.values_are_keys for one in attentions),
        "inputs of each layer by itself": model.side is not None,
        "queries by position alone": any(one.placed_query for one in attentions),
        "blocks with a factor, or of one part alone,": any(
            one.scaled or one.only for one in model.blocks
        ),
        "experts without gates, or with norms of their own,": experts is not None
        and bool(experts.apart or (model.sparse and not model.sparse.gated)),
    }
    return [what for what, given in there.items() if given]


def unsupported(model: Decoder, *, native: bool = False) -> list[str]:
    """Reasons why neither the MindSpore network nor the native kernels support a model; empty if
    one does, or for a custom network. `native`: of the native kernels alone, which know more."""
    if custom_network(model) is not None:
        return []
    attentions = [block.attention for block in model.blocks]
    reasons = [] if native else [f"{one} need backend=native" for one in native_parts(model)]
    placed = model.length_dependent or model.learned_positions
    if model.learned_keys and (
        placed
        or any(
            one.alibi or one.window or one.chunk or one.temperature or one.latent
            for one in attentions
        )
        or model.heads_differ
        or len(model.cached) < model.num_layers
    ):
        reasons.append(
            "learned keys need rotary positions and attention over the whole text, equal in all"
            " layers"
        )
    if any(one.chunk and one.window for one in attentions):
        reasons.append("attention has chunks and windows")
    if len({block.recurrent for block in model.blocks} - {None}) > 1:
        reasons.append("recurrent layers differ from each other")
    if any(block.recurrent and (block.parallel or block.norm is None) for block in model.blocks):
        reasons.append("a recurrent layer has no norm, or is parallel to the feed-forward")
    if any(
        one.placed_query and (one.latent or one.gated or one.kv_heads < one.heads)
        for one in attentions
    ):
        reasons.append("queries by position alone with latent, gated or grouped attention")
    if any(one.gated and (one.latent or one.clip is not None) for one in attentions):
        reasons.append("gated attention with latent attention or clipped queries")
    if len({(one.rotary, one.head_dim) for one in attentions if one.rotary}) > len(model.rotaries):
        reasons.append("heads of different sizes share rotary positions")
    if any(one.borrowed is not None and one.latent for one in attentions):
        reasons.append("layers share keys of latent attention")
    if len({one.alibi for one in attentions}) > 1:
        reasons.append("positions differ between its layers")
    if any(one.dims and one.scaling and one.scaling.type == "dynamic" for one in model.rotaries):
        reasons.append("dynamic scaling of RoPE with partly rotated heads")
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
        reasons.append("attention and feed-forward share a norm without being parallel")
    if any(one.parallel and one.feed_forward.experts is not None for one in model.blocks):
        reasons.append("experts with a parallel residual connection")
    if model.head_bias and (model.tie_word_embeddings or model.logits_scaling != 1):
        reasons.append("a head with a bias and tied weights or scaled logits")
    if any(one.latent and one.head_dim % 2 for one in attentions):
        reasons.append("latent attention with an odd rank")
    if any(one.clip is not None and (one.latent or one.qk_norm_late) for one in attentions):
        reasons.append("clipped queries before a norm, or in latent attention")
    if any(one.qk_norm_late and not one.qk_norm_by_head for one in attentions):
        reasons.append("queries and keys normalized over all heads after RoPE")
    for size in {one.head_dim for one in attentions if one.rotary and one.head_dim % 2}:
        reasons.append(f"rotary positions need an even head_dim, got {size}")
    return reasons
