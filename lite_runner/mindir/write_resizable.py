"""The `resizable` layout: one graph for prefill and decode, for MindSpore Lite 2.0.0."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mindspore import Tensor

from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ConfigError
from lite_runner.mindir.lite_rewrite import rewrite_for_lite
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.mindir.resizable_inputs import (
    Shape,
    dynamic_inputs,
    dynamic_outputs,
    inputs_of,
    unsupported,
)
from lite_runner.mindir.resizable_network import ResizableNetwork
from lite_runner.mindir.writer import write_mindir
from lite_runner.networks.layers import Weights

# Traced for one token, Lite silently computes wrong results for any other number.
TRACED_TOKENS = 2
TRACED_PAST = 4  # small: Lite allocates the traced shape when it loads


def export_resizable(
    model: Decoder,
    weights: Weights,
    folder: Path,
    name: str,
    *,
    batch_size: int,
    seq_length: int,
) -> dict[GraphName, Graph]:
    """Write `<name>_graph.mindir` into a folder, and above 1 GB `<name>_variables` beside it.

    It is traced for `batch_size` rows, and can be resized to any number. It does not depend on
    `seq_length` (maximum tokens per row), which only bounds the traced shape. Raises ConfigError
    for an `unsupported` model.
    """
    if reasons := unsupported(model):
        raise ConfigError(
            f"the layout resizable does not support {model.architecture}: {'; '.join(reasons)}",
            "export.layout=dynamic or export.layout=static_pair",
        )
    network = ResizableNetwork(model, weights)
    shape = Shape(batch_size, TRACED_TOKENS, min(TRACED_PAST, seq_length))
    examples = [Tensor(np.zeros(one.shape, one.dtype)) for one in inputs_of(model, shape)]
    file = write_mindir(network, examples, folder, name, enc_key=None)
    rewrite_for_lite(folder / file)
    return {"model": Graph(file, dynamic_inputs(model), dynamic_outputs(model))}
