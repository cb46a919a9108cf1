"""An architecture: how a decoder is read from the forms that others keep it in, and its names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names, Parameter
from lite_runner.architectures.spec import Decoder


@dataclass(frozen=True)
class MindFormers:
    """What MindFormers calls an architecture."""

    config: str  # type in model_config
    network: str  # type in arch
    inputs: str  # style of its exported graphs: see export/pair_inputs.py
    settings: Callable[[Decoder], dict[str, Any]]  # of model_config, beside those of all
    read: Callable[[Mapping[str, Any]], Decoder]  # of all of model_config, by name


@dataclass(frozen=True)
class GGUF:
    """What llama.cpp calls an architecture, and how it keeps one."""

    # By key of config.json: the key in the file, without the architecture in front.
    keys: Mapping[str, str]
    permuted: bool = False  # rows of q and k are reordered for its rotary embedding
    # What of config.json the names of a file's tensors tell besides, and what `keys` gave.
    told: Callable[[Container[str], Mapping[str, Any]], dict[str, Any]] = lambda tensors, given: {}


@dataclass(frozen=True)
class OwnNetwork:
    """A network that nothing here describes, from `lite_runner.register`."""

    network: Callable[..., Any]  # (model, weights by name, BuildOptions) -> a MindSpore Cell
    tensors: Callable[[Decoder], Iterable[Parameter]]  # all but a head that is not tied
    code: str  # sha256 of its source: what is kept between runs and made by it is kept by this


@dataclass(frozen=True, eq=False)
class Architecture:
    """One file of this package, or what `lite_runner.register` was given."""

    name: str  # model_type of config.json, and general.architecture of GGUF
    read: Callable[[Fields], Decoder]  # of config.json
    names: Names = field(default_factory=dict)
    # config.json, but for what all models have in it; None: not transformers'.
    write: Callable[[Decoder], dict[str, Any]] | None = None
    mindformers: MindFormers | None = None
    gguf: GGUF | None = None
    conv1d: bool = False  # transformers holds its linear layers [in, out]
    fused_by_head: bool = False  # transformers' q, k and v: each head's three are neighbours
    always_tied: bool = False  # there is no head but the embedding
    own: OwnNetwork | None = None


_SHARED = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "seq_length"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def shared_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of MindFormers' model_config, what has the same name in every architecture, and here."""
    return {name: given[name] for name in _SHARED}
