"""Writes SmolLM2 as ONNX for benchmarks/peer_onnxruntime.py: the graph of the layout `resizable`.

MindSpore's ONNX has fixed shapes, so there are two graphs: prefill.onnx takes one prompt,
decode.onnx one token of every row behind a cache of a fixed span. Beside them prefill.npz and
decode.npz hold the inputs that do not change from step to step, by name, and checks.npz a prompt,
a token after it, and the online backend's logits for both: the peer has neither MindSpore nor this
package.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.onnx
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Row
from lite_runner.backends.lite.layouts import decode_span
from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions
from lite_runner.config.argv import parse
from lite_runner.mindir.graph_inputs import Positions, Shape, fill_bias, gather_indices, inputs_of
from lite_runner.mindir.write_resizable import ResizableNetwork
from lite_runner.model import ModelFiles
from lite_runner.model.locate import locate
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.read_ahead import ReadAhead


def network_of(files: ModelFiles) -> ResizableNetwork:
    weights = ReadAhead(files.tensors())
    try:
        network = ResizableNetwork(files.model, weights)
    finally:
        weights.close()
    for block in network.blocks:  # the converter knows no axes that count from the end
        block.activation.split = ops.Split(1, 2)
    network.set_train(False)
    return network


def constants(model: Decoder, shape: Shape, start: int) -> dict[str, NDArray[Any]]:
    """The inputs of rows whose first new token stands at `start`, but for tokens and cache.

    cos and sin are given for every position: [positions, 1, heads, D], to be taken from.
    """
    bias = next(spec.shape for spec in inputs_of(model, shape) if spec.name == "bias")
    values: dict[str, NDArray[Any]] = {"bias": np.empty(bias, np.float32)}
    starts = np.full(shape.rows, start)
    fill_bias(values["bias"], starts, shape.tokens, None, None)
    for name, rows in gather_indices(model, shape).items():
        values[name] = rows.astype(np.int32)
    length = shape.tokens + shape.past
    cos, sin = Positions(model, length).rotary(np.arange(length)[None], np.array([length]))
    rotated = model.num_heads + model.n_kv_heads
    for name, angles, still in (("cos", cos, 1.0), ("sin", sin, 0.0)):
        every = np.full((length, rotated + model.n_kv_heads, model.head_dim), still, np.float32)
        every[:, :rotated] = angles[:, None]
        values[name] = every
    return values


def checks(files: ModelFiles, prompt_tokens: int) -> dict[str, NDArray[Any]]:
    """Logits of the online backend for a prompt and a token after it, in one slot."""
    weights = ReadAhead(files.tensors())
    try:
        options = MindSporeOptions(slots=1, length=prompt_tokens + 1)
        backend = MindSporeBackend(files.model, weights, options)
    finally:
        weights.close()
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, files.model.vocab_size, prompt_tokens + 1).astype(np.int32)
    logits = [backend.forward([Row(0, tokens[:-1], 0)])[0]]
    logits.append(backend.forward([Row(0, tokens[-1:], prompt_tokens)])[0])
    backend.close()
    return {"tokens": tokens, "logits": np.stack(logits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="it is made")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    config, _ = resolve(parse(["model=smollm2_135m", "predict_data=ids"], heads()))
    files = locate(config.source)
    model, length = files.model, arguments.prompt_tokens

    arguments.folder.mkdir(parents=True)
    np.savez(arguments.folder / "checks.npz", **checks(files, length))
    ms.set_context(mode=ms.GRAPH_MODE)
    network = network_of(files)
    span = decode_span(length + arguments.new_tokens - 1)
    # As in the offline backend: a prompt goes alone, and a size of zero is none.
    graphs = {
        "prefill": (Shape(1, length, 1), 0),
        "decode": (Shape(arguments.batch, 1, span - 1), length),
    }
    for name, (shape, start) in graphs.items():
        specs = inputs_of(model, shape)
        examples = [Tensor(np.zeros(spec.shape, spec.dtype)) for spec in specs]
        ms.onnx.export(
            network,
            *examples,
            file_name=str(arguments.folder / name),
            input_names=[spec.name for spec in specs],
        )
        np.savez(arguments.folder / f"{name}.npz", **constants(model, shape, start))


if __name__ == "__main__":
    main()
