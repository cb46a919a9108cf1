"""Registration of architectures and of exported graphs' inputs, by our names and MindFormers'."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import KNOWN, Architecture, CustomNetwork, Parameter
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Split
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.mindir.graph_inputs import (
    MAPPING,
    CommonInputsOfInfer,
    InputsOfInfer,
    LlamaInputsOfInfer,
    specs_of,
)
from lite_runner.mindir.manifest import GraphName

if TYPE_CHECKING:
    from lite_runner.mindir.write_static_pair import Steps
    from lite_runner.networks.decoder import Network

ModelInput = Callable[[int, int], Sequence[Any]]  # (batch size, sequence length) -> tensors


def register(
    architecture: Architecture | str,
    *,
    network: Network | None = None,
    tensors: Callable[[Decoder], Iterable[Parameter]] | None = None,
    config: Callable[[Fields], Decoder] | None = None,
    inputs: type[InputsOfInfer] | None = None,
    shard: Mapping[str, Split] | None = None,
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

    `shard` says which of its tensors tensor parallel ranks share, by patterns of their names:
    {"*.q": "outputs", "*.out": "inputs", "words": "vocabulary"}; "key_heads" is "outputs" where
    there may be fewer key/value heads than ranks. All others are whole on every rank. The network
    gets the sizes and weights of its rank, and sums what a layer split by inputs gives:
    Linear(options, weight, combine=summed(options.parallel)).

    `inputs` is what the exported pair takes; not given: an Architecture's own, else those of BLOOM
    and GPT-2. Registering a name again replaces it. Raises ConfigError for a name that is built in.
    """
    _check_name(architecture if isinstance(architecture, str) else architecture.name)
    if isinstance(architecture, Architecture):
        given = (network, tensors, config, shard)
        if given != (None, None, None, None):
            raise ConfigError(
                f"register: {architecture.name} is described",
                "network=, tensors=, config= and shard= are for a name with a network of its own",
            )
        added = architecture
    elif network is None or tensors is None or config is None:
        raise ConfigError(
            f"register: {architecture!r} without network=, tensors= and config=",
            "give them, or an Architecture: docs/python-api.md",
        )
    else:
        if shard is not None:
            tensors = _sharded(tensors, shard)
        own = CustomNetwork(network, tensors, _code_of(network))
        added = Architecture(architecture, config, custom=own)
    if inputs is not None or added.mindformers is None:
        MAPPING[added.name] = _style(inputs or CommonInputsOfInfer)
    KNOWN[added.name] = added
    _REGISTERED.add(added.name)


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


class BaseInputsOfInfer:
    """MindFormers' base of a class that gives the graphs of a model their inputs."""

    def get_inputs(self, model: Any, **kwargs: Any) -> list[NDArray[Any]]:
        """The inputs of a run, from input_ids [b, s], current_index, valid_length [b], init_reset
        and is_first_iteration. In increments input_ids holds only each row's last token, at its
        place; `model` is None: the engine copies the arrays."""
        raise NotImplementedError

    @staticmethod
    def get_lite_tensor_list(inputs: Sequence[Any], model: Any) -> list[NDArray[Any]]:
        """The inputs as arrays."""
        return [np.asarray(one) for one in inputs]


class _ByPosition(InputsOfInfer):
    """A class of MindFormers' form as an InputsOfInfer: `names` are those of the arguments that it
    returns, whatever it computes is named by its place."""

    def __init__(self, theirs: BaseInputsOfInfer) -> None:
        self._theirs = theirs
        given = self._arguments(np.ones((1, 4), np.int32), np.array([4]), np.array([3]), True)
        inputs = theirs.get_inputs(None, **given)
        self.names = tuple(
            next((name for name, array in given.items() if array is one), f"input_{index}")
            for index, one in enumerate(inputs)
        )

    def get_inputs(
        self,
        *,
        input_ids: NDArray[np.int32],
        valid_length: NDArray[np.int32],
        current_index: NDArray[np.int32],
        is_first_iteration: bool,
        seq_length: int,
    ) -> list[NDArray[Any]]:
        if not is_first_iteration:
            whole = np.zeros((len(input_ids), seq_length), np.int32)
            whole[np.arange(len(input_ids)), np.maximum(valid_length, 1) - 1] = input_ids[:, 0]
            input_ids = whole
        given = self._arguments(input_ids, valid_length, current_index, is_first_iteration)
        return self._theirs.get_inputs(None, **given)

    @staticmethod
    def _arguments(
        ids: NDArray[np.int32], valid: NDArray[Any], index: NDArray[Any], first: bool
    ) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "current_index": index.astype(np.int32, copy=False),
            "init_reset": np.array([not first]),
            "valid_length": valid.astype(np.int32, copy=False),
            "is_first_iteration": first,
        }


class _InputClasses(UserDict[str, type]):
    """Classes by a model's name, or by any name for graphs of others."""

    def __setitem__(self, name: str, inputs: type) -> None:
        if inputs not in (CommonInputsOfInfer, LlamaInputsOfInfer):
            if not issubclass(inputs, BaseInputsOfInfer):
                raise ConfigError(
                    f"InputOfInfer.MAPPING[{name!r}]: got {inputs.__name__}, expected a"
                    " BaseInputsOfInfer",
                    "lite_runner.register_inputs takes classes of our own form",
                )
            others = dict(MAPPING)
            MAPPING.clear()  # the latest comes first: of several with these names it is taken
            MAPPING[name] = _ByPosition(inputs())
            MAPPING.update({key: one for key, one in others.items() if key != name})
        super().__setitem__(name, inputs)


class InputOfInfer:
    """MindFormers' table of the classes: what a script adds is what feeds its graphs."""

    MAPPING = _InputClasses()


def _example(inputs: InputsOfInfer, graph: GraphName, batch: int, length: int) -> tuple[Any, ...]:
    specs = specs_of(inputs, graph, batch, length)
    return tuple(np.ones(spec.shape, spec.dtype) for spec in specs)


def get_llm_common_prefill_model_input(batch_size: int, seq_length: int) -> tuple[Any, ...]:
    """Inputs that a prefill graph of BLOOM and GPT-2 is traced with."""
    return _example(CommonInputsOfInfer(), "prefill", batch_size, seq_length)


def get_bloom_inc_model_input(batch_size: int, seq_length: int) -> tuple[Any, ...]:
    """Inputs that their increment graph is traced with."""
    return _example(CommonInputsOfInfer(), "increment", batch_size, seq_length)


def get_llama_prefill_model_input(batch_size: int, seq_length: int) -> tuple[Any, ...]:
    """Inputs that a prefill graph of Llama is traced with."""
    return _example(LlamaInputsOfInfer(), "prefill", batch_size, seq_length)


class _PrefillInputs(UserDict[str, ModelInput]):
    """Functions by a model's name."""

    def __setitem__(self, name: str, function: ModelInput) -> None:
        asked = [(tuple(one.shape), _dtype(one)) for one in function(2, 8) if one is not None]
        for inputs in MAPPING.values():
            specs = specs_of(inputs, "prefill", 2, 8)
            if [(spec.shape, spec.dtype) for spec in specs] == asked:
                break
        else:
            raise ConfigError(
                f"PREFILL_MODEL_INPUT_MAP[{name!r}]: no class gives a graph the inputs"
                f" {', '.join(f'{dtype} {list(shape)}' for shape, dtype in asked)}",
                f"InputOfInfer.MAPPING[{name!r}] = the class that does, before this; networks"
                " of other inputs need lite_runner.register_inputs(..., steps=)",
            )
        if name not in MAPPING and name not in KNOWN:
            MAPPING[name] = inputs
        super().__setitem__(name, function)


def _dtype(tensor: Any) -> str:
    """NumPy's name of the type of an array or a MindSpore Tensor."""
    return str(tensor.dtype).rpartition(".")[2].lower().replace("bool_", "bool")


InputOfInfer.MAPPING.update(
    {"bloom": CommonInputsOfInfer, "gpt2": CommonInputsOfInfer, "llama": LlamaInputsOfInfer}
)
PREFILL_MODEL_INPUT_MAP = _PrefillInputs(
    {
        "bloom": get_llm_common_prefill_model_input,
        "gpt2": get_llm_common_prefill_model_input,
        "llama": get_llama_prefill_model_input,
    }
)


_GRAPHS = {"prefill", "increment"}
_REGISTERED: set[str] = set()


def _sharded(
    tensors: Callable[[Decoder], Iterable[Parameter]], shard: Mapping[str, Split]
) -> Callable[[Decoder], Iterable[Parameter]]:
    """The tensors with their splits. ConfigError for one that there is not."""
    splits = [split for split in get_args(Split) if split != "none"]
    for pattern, split in shard.items():
        if split not in splits:
            raise ConfigError(
                f"register: shard[{pattern!r}]: got {split!r}, expected one of {', '.join(splits)}"
            )

    def with_splits(model: Decoder) -> Iterable[Parameter]:
        found = list(tensors(model))
        for pattern, split in shard.items():
            at = [index for index, one in enumerate(found) if fnmatchcase(one.name, pattern)]
            if not at:
                names = ", ".join(one.name for one in found[:9])
                raise ConfigError(f"register: shard[{pattern!r}]: no tensor of that name: {names}")
            for index in at:
                found[index] = replace(found[index], split=split)
        return found

    return with_splits


def _check_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(f"register: got the name {name!r}, expected letters, digits and . _ -")
    if name not in _REGISTERED and (name in KNOWN or name in MAPPING):
        raise ConfigError(f"register: {name} is there already", "choose another name")


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
                f"{inputs.__name__}: {type(known).__name__} has the inputs {', '.join(names)}"
                " too, and a graph is recognized by the names alone",
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
