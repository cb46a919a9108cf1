"""Inputs of the two graphs of a static pair, in order: a class for each kind of decoder.

Shapes: b rows of the batch, s maximum positions per row. `lite_runner.register_inputs` adds to
MAPPING.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import GraphName, TensorSpec

Ints = NDArray[np.int32]


class InputsOfInfer(Protocol):
    """The inputs of one kind of decoder."""

    @property
    def names(self) -> tuple[str, ...]:
        """Input names, in order; they identify the graphs that take them."""
        ...

    def get_inputs(
        self,
        *,
        input_ids: Ints,
        valid_length: Ints,
        current_index: Ints,
        is_first_iteration: bool,
        seq_length: int,
    ) -> list[NDArray[Any]]:
        """An array for each of `names`, with the graph's shape and type.

        `input_ids`: [b, s] in the prefill (the first iteration), [b, 1] in an increment;
        `valid_length` [b]: tokens of each row, these included; `current_index` [b]: index of each
        row's last token in the flattened batch of prompts; `seq_length`: s.
        """
        ...


class _MindFormersInputs:
    """Inputs that MindFormers' own decoders take, by name."""

    names: tuple[str, ...]

    def get_inputs(
        self,
        *,
        input_ids: Ints,
        valid_length: Ints,
        current_index: Ints,
        is_first_iteration: bool,
        seq_length: int,
    ) -> list[NDArray[Any]]:
        given = {
            "input_ids": input_ids,
            "valid_length": valid_length,
            "current_index": current_index,
        }

        def value(name: str) -> NDArray[Any]:
            if name == "init_reset":
                return np.array([not is_first_iteration])
            if name == "batch_index":  # cache slots
                return np.arange(len(input_ids), dtype=np.int64)
            if name == "zactivate_len":
                return np.arange(seq_length, dtype=np.int64)
            return given[name]

        return [value(name) for name in self.names]


class CommonInputsOfInfer(_MindFormersInputs):
    """BLOOM and GPT-2."""

    names = ("input_ids", "current_index", "init_reset", "valid_length")


class LlamaInputsOfInfer(_MindFormersInputs):
    """Llama and Qwen2."""

    names = ("input_ids", "valid_length", "batch_index", "zactivate_len")


COMMON, LLAMA = CommonInputsOfInfer(), LlamaInputsOfInfer()
# By the `inputs` of an architecture, or by any name for foreign graphs.
MAPPING: dict[str, InputsOfInfer] = {"common": COMMON, "llama": LLAMA}


def inputs_style(model: Decoder) -> InputsOfInfer:
    """The inputs of the graphs that a model is exported to."""
    theirs = architecture_of(model).mindformers
    if model.architecture in MAPPING or theirs is None:
        return MAPPING[model.architecture]
    return MAPPING[theirs.inputs]


def arrays_of(
    inputs: InputsOfInfer, graph: GraphName, ids: Ints, valid: Ints, seq_length: int
) -> list[NDArray[Any]]:
    """The arrays for one run of a graph: ids [b, s or 1] and the tokens of each row [b]."""
    rows = np.arange(len(ids), dtype=np.int32)
    return inputs.get_inputs(
        input_ids=ids,
        valid_length=valid,
        # In both graphs MindFormers indexes the flattened batch of prompts.
        current_index=rows * seq_length + np.maximum(valid, 1) - 1,
        is_first_iteration=graph == "prefill",
        seq_length=seq_length,
    )


def specs_of(
    inputs: InputsOfInfer, graph: GraphName, batch_size: int, seq_length: int
) -> tuple[TensorSpec, ...]:
    """Names, shapes and types of a graph's inputs."""
    ids = np.zeros((batch_size, seq_length if graph == "prefill" else 1), np.int32)
    arrays = arrays_of(inputs, graph, ids, np.ones(batch_size, np.int32), seq_length)
    return tuple(
        TensorSpec(name, array.shape, array.dtype.name)
        for name, array in zip(inputs.names, arrays, strict=True)
    )


def same_but_for_ones(given: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> bool:
    """Whether inputs match apart from axes of size 1: [b] matches [b, 1]."""

    def plain(spec: TensorSpec) -> tuple[str, str, list[int]]:
        return spec.name, spec.dtype, [size for size in spec.shape if size != 1]

    return [*map(plain, given)] == [*map(plain, wanted)]


def inputs_named(names: Sequence[str]) -> InputsOfInfer:
    """The inputs with these names, in this order. Raises ArtifactError if there are none."""
    for inputs in MAPPING.values():
        if inputs.names == tuple(names):
            return inputs
    known = sorted({f"({', '.join(inputs.names)})" for inputs in MAPPING.values()})
    raise ArtifactError(
        f"a pair of graphs with the inputs ({', '.join(names)}), expected {' or '.join(known)}",
        "lite_runner.register_inputs adds others",
    )
