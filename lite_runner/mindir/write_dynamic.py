"""The dynamic layout: one graph with a dynamic number of tokens, for MindSpore's own runtime.

The graph takes tokens of one slot (a prompt, a prompt chunk or a new token), and keeps the KV cache
of all slots in its Parameters.
"""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from lite_runner.architectures.spec import Decoder
from lite_runner.mindir.dynamic_inputs import INPUTS
from lite_runner.mindir.manifest import Graph, GraphName, TensorSpec
from lite_runner.mindir.writer import check_length, write_mindir
from lite_runner.networks.layers import BuildOptions, CacheSize, Weights
from lite_runner.networks.steps import Prefill, network_of


def export_dynamic(
    model: Decoder,
    weights: Weights,
    folder: Path,
    name: str,
    *,
    slots: int,
    seq_length: int,
    dtype: str,
    enc_key: bytes | None,
) -> dict[GraphName, Graph]:
    """Write `<name>_graph.mindir` with a cache of `slots` rows of `seq_length` positions.

    It takes INPUTS; output: logits [1, vocab] after the last token. Raises ConfigError if
    `seq_length` exceeds the model's.
    """
    check_length(model, seq_length)
    build = BuildOptions(CacheSize(slots, seq_length), getattr(ms, dtype))
    network = Prefill(network_of(model, weights, build))
    one = Tensor(np.zeros(1, np.int32))
    inputs = [Tensor(shape=[1, None], dtype=ms.int32), one, one, one]
    file = write_mindir(network, inputs, folder, name, enc_key)
    return {"model": Graph(file, INPUTS, (TensorSpec("logits", (1, model.vocab_size), "float32"),))}
