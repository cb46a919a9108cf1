"""New architectures: a family of models, and the inputs of exported graphs, by a class each."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable

from lite_runner.architectures import KNOWN, Architecture, OwnNetwork, Parameter
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.export.pair_inputs import MAPPING, CommonInputsOfInfer, InputsOfInfer
from lite_runner.export.static_pair import STEPS, Steps
from lite_runner.models.networks import Network

_GRAPHS = {"prefill", "increment"}


def register(
    family: str,
    *,
    network: Network,
    tensors: Callable[[Decoder], Iterable[Parameter]],
    config: Callable[[Fields], Decoder],
    inputs: type[InputsOfInfer] = CommonInputsOfInfer,
) -> None:
    """Add a family: from now on a folder whose config.json has this model_type is a model.

    `network` is a Cell as models/decoder.py has one: made of (Decoder, weights by name,
    BuildOptions), called with tokens [R, T], position and length [R] and slot [R] or None, to
    logits [R, vocab]; its `blocks` hold an Attention each, where beams find the cache. `tensors`
    tells the name and shape of every weight, but not of a head that is not tied, which is
    lm_head.weight. `config` reads config.json. `inputs` is what its exported pair takes.

    Registering it again replaces it. Raises ConfigError for a name that is built in.
    """
    if not re.fullmatch(r"\w[\w.-]*", family):
        raise ConfigError(f"register: got the name {family!r}, expected letters, digits and . _ -")
    known = KNOWN.get(family)
    if (known is not None and known.own is None) or (known is None and family in MAPPING):
        raise ConfigError(f"register: {family} is there already", "choose another name")
    style, own = _style(inputs), OwnNetwork(network, tensors, _code_of(network))
    MAPPING[family] = style
    KNOWN[family] = Architecture(family, config, own=own)


def register_inputs(name: str, inputs: type[InputsOfInfer], *, steps: Steps | None = None) -> None:
    """Add a style of graphs: a pair whose inputs have its `names` is fed by its `get_inputs`.

    `steps` are the Cells that export such a pair, {"prefill": ..., "increment": ...}, each made of
    (network, batch size, sampled) as in export/static_pair.py; without them such pairs are only
    run. Raises ConfigError where the name, or the names of the inputs, mean another style.
    """
    style = _style(inputs)
    known = KNOWN.get(name)
    built_in = known is not None and known.own is None
    if built_in or (name in MAPPING and MAPPING[name].names != style.names):
        raise ConfigError(f"register_inputs: {name} is there already", "choose another name")
    if steps is not None and steps.keys() != _GRAPHS:
        raise ConfigError(f"steps: got {sorted(steps)}, expected {sorted(_GRAPHS)}")
    MAPPING[name] = style
    if steps is not None:
        STEPS[style.names] = steps


def _style(inputs: type[InputsOfInfer]) -> InputsOfInfer:
    """An object of the class; the one there is, where it is known."""
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
    """sha256 of the file that defines a network, of the class alone in a notebook."""
    try:
        module = sys.modules[network.__module__]
        code = inspect.getsource(module if getattr(module, "__file__", None) else network)
    except (AttributeError, KeyError, OSError, TypeError) as error:
        raise ConfigError(
            f"network: got {network!r}, expected a class whose source can be read",
            "MindSpore compiles it from its source: put it into a file",
        ) from error
    return hashlib.sha256(code.encode()).hexdigest()
