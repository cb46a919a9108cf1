"""An architecture: readers and writers of its configs, and its tensor names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import field
from typing import Any

from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names, Parameter, StoredRows, apart, stacked
from lite_runner.architectures.settings import DecoderSettings, Translation
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass

# A yaml of MindFormers, and the settings of the model of conf/ that it is merged over.
Translate = Callable[[Mapping[str, Any], Mapping[str, Any], Translation], None]


@dataclass(frozen=True)
class MindFormers:
    """MindFormers' names and settings of an architecture."""

    section: type[DecoderSettings]  # model_config
    network: str  # type in arch
    inputs: str  # input style of its exported graphs: see mindir/graph_inputs.py
    settings: Callable[[Decoder], dict[str, Any]]  # of model_config, besides the shared ones
    read: Callable[[Mapping[str, Any]], Decoder]  # from the full model_config
    # Sizes that a graph tells besides the shared ones: its name -> the name of Decoder.
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
    # (tensor names, values of `keys`) -> further config.json fields inferred from them.
    infer: Callable[[Container[str], Mapping[str, Any]], dict[str, Any]] = lambda tensors, given: {}
    name: str = ""  # general.architecture; "": that of the architecture
    written: bool = True  # False: such files are read alone
    # Where a tensor's rows are among its own of the file, in which fused ones follow each other.
    rows: StoredRows = apart


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
    norms_less_one: bool = False  # transformers stores the weights of norms less 1
    next_token_layers: bool = False  # files have layers behind the model's that predict further
    custom: CustomNetwork | None = None
    # What of a model transformers' of that name computes otherwise; its config.json is ours then.
    not_theirs: Callable[[Decoder], str | None] = lambda model: None
    renamed: Callable[[Decoder], Names] = lambda model: {}  # names that a model has others of


_SHARED = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def shared_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The MindFormers settings whose names equal fields of Decoder, for every architecture."""
    return {name: given[name] for name in _SHARED}
