"""The dynamic layout of quantized weights: a step graph of the native CPU kernels.

The graph takes tokens of any slots, up to its capacity, and keeps the packed weights and the KV
cache of all slots in its Parameters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from mindspore import Tensor

from lite_runner.architectures.spec import Decoder
from lite_runner.mindir.manifest import Graph, GraphName, Operators, TensorSpec
from lite_runner.mindir.operators import write_graph
from lite_runner.mindir.writer import check_length
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import Weights
from lite_runner.networks.native import NativeNetwork, NativeStep


def export_native(
    model: Decoder,
    weights: Weights,
    folder: Path,
    name: str,
    *,
    slots: int,
    seq_length: int,
    operators: Operators,
    inputs: tuple[TensorSpec, ...],
) -> tuple[dict[GraphName, Graph], Operators]:
    """Write `<name>_graph.mindir` and its variables, with a cache of `slots` rows.

    `inputs` are those of a NativeStep; output: logits [slots, vocab] after the wanted tokens.
    Returns `operators` with the format of the packed layers. Raises ConfigError if `seq_length`
    exceeds the model's.
    """
    check_length(model, seq_length)
    rounded = operators.rounded_input
    options = NativeOptions(slots, seq_length, operators.kv_cache, rounded_input=rounded)
    network = NativeNetwork(model, weights, options)
    network.resize(options)
    step = NativeStep(network, operators.capacity, slots)
    examples = [Tensor(np.zeros(one.shape, one.dtype)) for one in inputs]
    file = write_graph(step, examples, folder, name)
    logits = TensorSpec("logits", (slots, model.vocab_size), "float32")
    written = dataclasses.replace(operators, format=network.format)
    return {"model": Graph(file, inputs, (logits,))}, written
