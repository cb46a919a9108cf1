"""What models are: one file an architecture, from which all else is derived. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

from lite_runner.architectures.architecture import Architecture as Architecture
from lite_runner.architectures.architecture import MindFormers
from lite_runner.architectures.architecture import OwnNetwork as OwnNetwork
from lite_runner.architectures.bloom import BLOOM
from lite_runner.architectures.gpt2 import GPT2
from lite_runner.architectures.llama import LLAMA
from lite_runner.architectures.mistral import MISTRAL
from lite_runner.architectures.naming import Parameter as Parameter
from lite_runner.architectures.naming import Part, Role, parameters_of
from lite_runner.architectures.qwen2 import QWEN2
from lite_runner.architectures.qwen3 import QWEN3
from lite_runner.architectures.spec import Decoder

# By name; lite_runner.register adds to it.
KNOWN: dict[str, Architecture] = {
    one.name: one for one in (BLOOM, LLAMA, QWEN2, GPT2, QWEN3, MISTRAL)
}


def architecture_of(model: Decoder) -> Architecture:
    """The architecture that a model is of."""
    return KNOWN[model.architecture]


def of_settings(config: str, given: Mapping[str, Any]) -> Decoder:
    """The decoder that settings of MindFormers' type `config` describe, by name, all of them."""
    return _of_mindformers(config).read(given)


def network_name(config: str) -> str:
    """MindFormers' network of the type `config`."""
    return _of_mindformers(config).network


def _of_mindformers(config: str) -> MindFormers:
    kinds = (one.mindformers for one in KNOWN.values())
    # Several architectures may share a type: the first of them tells them apart.
    return next(kind for kind in kinds if kind and kind.config == config)


def own_network(model: Decoder) -> OwnNetwork | None:
    """The network of a model that nothing here describes; None: the model is its description."""
    return architecture_of(model).own


def network_code(model: Decoder) -> str | None:
    """What keeps apart what networks of users' own have made: see OwnNetwork.code."""
    own = own_network(model)
    return None if own is None else own.code


def may_untie(model: Decoder) -> bool:
    """Whether a model of this architecture can have a head of its own."""
    architecture = architecture_of(model)
    return architecture.own is None and not architecture.always_tied


def parameters(model: Decoder) -> tuple[Parameter, ...]:
    """Every tensor of the model, in the order of its layers."""
    return _parameters(architecture_of(model), model)


@lru_cache(maxsize=16)
def _parameters(architecture: Architecture, model: Decoder) -> tuple[Parameter, ...]:
    own = architecture.own
    if own is None:
        return tuple(parameters_of(model, architecture.names))
    head = [one for one in parameters_of(model, {}) if one.role == "head"]
    return (*own.tensors(model), *head)


Place: TypeAlias = tuple[Role | None, int | None, Part]  # role, layer, weight or bias


def by_place(model: Decoder) -> dict[Place, Parameter]:
    """Every tensor of a described model, by where it is in it."""
    return {(one.role, one.layer, one.kind): one for one in parameters(model)}
