"""Registers architectures, and the inputs of exported graphs."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from lite_runner.architectures import KNOWN, Architecture, CustomNetwork, Parameter
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.mindir.pair_inputs import MAPPING, CommonInputsOfInfer, InputsOfInfer

if TYPE_CHECKING:
    from lite_runner.mindir.write_static_pair import Steps
    from lite_runner.networks.steps import Network

_GRAPHS = {"prefill", "increment"}
_REGISTERED: set[str] = set()


def register(
    architecture: Architecture | str,
    *,
    network: Network | None = None,
    tensors: Callable[[Decoder], Iterable[Parameter]] | None = None,
    config: Callable[[Fields], Decoder] | None = None,
    inputs: type[InputsOfInfer] | None = None,
) -> None:
    """Add an architecture: from now on a folder whose config.json has this model_type is a model.

    An Architecture is described, as those of lite_runner/architectures are, and is run, quantized,
    cut and exported as they are.

    A network that no description fits is given by its name and three things: `network`, a Cell
    made of (Decoder, weights by name, BuildOptions) and called with tokens [R, T], position and
    length [R] and slot [R] or None, to logits [R, vocab], whose `blocks` hold an Attention each,
    where beams find the cache; `tensors`, the name and shape of every weight, but not of a head
    that is not tied, which is lm_head.weight; `config`, which reads config.json. It runs by
    MindSpore's operators.

    `inputs` is what the exported pair takes; not given: an Architecture's own, else those of BLOOM
    and GPT-2. Registering it again replaces it. Raises ConfigError for a name that is built in.
    """
    _check_name(architecture if isinstance(architecture, str) else architecture.name)
    if isinstance(architecture, Architecture):
        given = (network, tensors, config)
        if given != (None, None, None):
            raise ConfigError(
                f"register: {architecture.name} is described",
                "network=, tensors= and config= are for a name with a network of its own",
            )
        added = architecture
    elif network is None or tensors is None or config is None:
        raise ConfigError(
            f"register: {architecture!r} without network=, tensors= and config=",
            "give them, or an Architecture: docs/python-api.md",
        )
    else:
        own = CustomNetwork(network, tensors, _code_of(network))
        added = Architecture(architecture, config, custom=own)
    if inputs is not None or added.mindformers is None:
        MAPPING[added.name] = _style(inputs or CommonInputsOfInfer)
    KNOWN[added.name] = added
    _REGISTERED.add(added.name)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"register: got the name {name!r}, expected letters, digits and . _ -")
    if name not in _REGISTERED and (name in KNOWN or name in MAPPING):
        raise ConfigError(f"register: {name} is there already", "choose another name")


def register_inputs(name: str, inputs: type[InputsOfInfer], *, steps: Steps | None = None) -> None:
    """Register inputs of exported graphs: `get_inputs` feeds a pair whose inputs have its `names`.

    `steps` are the Cells that export such a pair, {"prefill": ..., "increment": ...}, each made of
    (network, batch size, sampled) as in mindir/write_static_pair.py; without them such pairs are
    only run. Raises ConfigError where the name, or the names of the inputs, mean another style.
    """
    style = _style(inputs)
    built_in = name in KNOWN and name not in _REGISTERED
    if built_in or (name in MAPPING and MAPPING[name].names != style.names):
        raise ConfigError(f"register_inputs: {name} is there already", "choose another name")
    if steps is not None and steps.keys() != _GRAPHS:
        raise ConfigError(f"steps: got {sorted(steps)}, expected {sorted(_GRAPHS)}")
    MAPPING[name] = style
    if steps is not None:
        # Here, since it brings MindSpore with it, which takes most of a second.
        from lite_runner.mindir.write_static_pair import STEPS

        STEPS[style.names] = steps


def _style(inputs: type[InputsOfInfer]) -> InputsOfInfer:
    """An object of the class; the registered one, where there is one."""
    names = getattr(inputs, "names", None)
    if not (isinstance(names, tuple) and names and all(isinstance(name, str) for name in names)):
        raise ConfigError(f"{inputs.__name__}.names: got {names!r}, expected a tuple of names")
    for known in MAPPING.values():
        if type(known) is inputs:
            return known
        if known.names == names:
            raise ConfigError(
                f"{inputs.__name__}: {type(known).__name__} has the inputs {', '.join(names)} too,"
                " and a graph tells only the names",
                f"inputs={type(known).__name__}",
            )
    return inputs()


def _code_of(network: Network) -> str:
    """sha256 of the source file of a network; in a notebook, of the class alone."""
    try:
        module = sys.modules[network.__module__]
        code = inspect.getsource(module if getattr(module, "__file__", None) else network)
    except (AttributeError, KeyError, OSError, TypeError) as error:
        raise ConfigError(
            f"network: got {network!r}, expected a class whose source can be read",
            "MindSpore compiles it from its source: put it into a file",
        ) from error
    return hashlib.sha256(code.encode()).hexdigest()
