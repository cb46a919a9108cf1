"""One process of onnxruntime in fp32 on SmolLM2 as ONNX; prints one line of JSON.

The graph is that of MindSpore Lite (benchmarks/export_onnx.py), and so is the cache: outside of the
graph, a prompt a row, then one token of every row. What proved fastest, on two threads: every
optimization, spinning threads, and inputs and outputs bound to arrays once. Token ids in and out,
NumPy only.

The first run of a shape exports it, with a Python that has lite-runner, and compares its logits
with the online backend's.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from measure import Measurement, engine_parser, seconds_since_start
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
EXPORT = HERE / "export_onnx.py"
TOLERANCE = 1e-4  # of the largest logit, as of every exported graph

Ids = NDArray[np.int64]


class Graph:
    """An ONNX graph whose inputs and outputs are arrays that stay."""

    def __init__(self, path: Path, threads: int, spinning: bool) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        self.session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.binding = self.session.io_binding()
        self.constants = dict(np.load(path.with_suffix(".npz")))
        self.inputs: dict[str, NDArray[Any]] = {}
        self.values = []  # onnxruntime reads and writes the arrays' memory through them
        for node in self.session.get_inputs():
            kind = np.int32 if node.type == "tensor(int32)" else np.float32
            self.inputs[node.name] = array = np.zeros(node.shape, kind)
            if node.name in self.constants and node.name not in ("cos", "sin"):
                array[:] = self.constants[node.name]
            self.values.append(onnxruntime.OrtValue.ortvalue_from_numpy(array))
            self.binding.bind_ortvalue_input(node.name, self.values[-1])
        self.outputs = []
        for node in self.session.get_outputs():
            self.outputs.append(np.empty(node.shape, np.float32))
            self.values.append(onnxruntime.OrtValue.ortvalue_from_numpy(self.outputs[-1]))
            self.binding.bind_ortvalue_output(node.name, self.values[-1])
        names = [name for name in self.inputs if name.startswith("past_")]
        self.past = [self.inputs[name] for name in names]

    def new(self) -> list[NDArray[np.float32]]:
        """The keys and values that the last run made, in the order of `past`."""
        return np.split(self.outputs[1], len(self.past), axis=1)

    def run(self, tokens: Ids, places: Any) -> NDArray[np.float32]:
        """Logits [rows, vocab] of new tokens at these positions."""
        self.inputs["tokens"][:] = tokens
        self.inputs["cos"][:] = self.constants["cos"][places]
        self.inputs["sin"][:] = self.constants["sin"][places]
        self.session.run_with_iobinding(self.binding)
        return self.outputs[0]


class Model:
    """Greedy decoding of rows of equal length."""

    def __init__(self, folder: Path, threads: int, spinning: bool) -> None:
        self.prefill = Graph(folder / "prefill.onnx", threads, spinning)
        self.decode = Graph(folder / "decode.onnx", threads, spinning)

    def start(self, prompts: Ids) -> NDArray[np.float32]:
        """Logits [rows, vocab] after prompts [rows, length]; begins anew."""
        rows, length = prompts.shape
        logits = []
        for row in range(rows):
            logits.append(self.prefill.run(prompts[row], slice(0, length)).copy())
            for past, new in zip(self.decode.past, self.prefill.new(), strict=True):
                past[row, :, :length] = new[0]
        self.decode.inputs["bias"][:] = self.decode.constants["bias"]
        return np.concatenate(logits)

    def step(self, tokens: Ids, position: int) -> NDArray[np.float32]:
        """Logits [rows, vocab] after one more token of every row."""
        logits = self.decode.run(tokens, position)
        for past, new in zip(self.decode.past, self.decode.new(), strict=True):
            past[:, :, position] = new[:, :, 0]
        self.decode.inputs["bias"][..., 1 + position] = 0.0  # the next token sees this one
        return logits

    def greedy(self, prompts: Ids, new_tokens: int) -> Iterator[Ids]:
        """The next token of every row, new_tokens times; no end token stops a row."""
        tokens = self.start(prompts).argmax(-1)
        yield tokens
        for position in range(prompts.shape[1], prompts.shape[1] + new_tokens - 1):
            tokens = self.step(tokens, position).argmax(-1)
            yield tokens


def export(folder: Path, python: Path, shape: list[str], threads: int) -> None:
    """Make the graphs; they get their folder's name when they compute what is expected."""
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    subprocess.run([python, EXPORT, "--folder", unfinished, *shape], check=True, stdout=sys.stderr)
    model = Model(unfinished, threads, spinning=True)
    expected = np.load(unfinished / "checks.npz")
    rows = len(model.decode.outputs[0])
    tokens = np.tile(expected["tokens"], (rows, 1))
    length = tokens.shape[1] - 1
    got = np.stack([model.start(tokens[:, :-1]), model.step(tokens[:, -1], length)])
    wanted = expected["logits"][:, None]
    error = float(np.abs(got - wanted).max() / np.abs(wanted).max())
    print(f"{folder.name}: off by {error:.1e} of the largest logit", file=sys.stderr)
    if not error <= TOLERANCE:  # NaN fails too
        sys.exit(f"{unfinished}: computes something else than the online backend")
    unfinished.replace(folder)


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--onnx", type=Path, required=True, help="folder to keep exports in")
    parser.add_argument("--export-python", type=Path, required=True, help="has lite-runner")
    parser.add_argument("--no-spinning", action="store_true", help="threads sleep between tasks")
    arguments = parser.parse_args()
    prompts = np.array(arguments.prompts)
    batch, length = prompts.shape

    code = hashlib.sha256()
    mindir = HERE.parent / "lite_runner/mindir"
    for path in (EXPORT, mindir / "graph_inputs.py", mindir / "write_resizable.py"):
        code.update(path.read_bytes())
    sizes = {"batch": batch, "prompt-tokens": length, "new-tokens": arguments.new_tokens}
    name = "-".join(["smollm2_135m", *map(str, sizes.values()), code.hexdigest()[:8]])
    folder = arguments.onnx / name
    if not folder.exists():
        shape = [part for key, size in sizes.items() for part in (f"--{key}", str(size))]
        export(folder, arguments.export_python, shape, arguments.threads)

    started = time.perf_counter()
    model = Model(folder, arguments.threads, not arguments.no_spinning)
    load_s = time.perf_counter() - started
    next(model.greedy(prompts, 1))
    first_token_s = seconds_since_start()

    Measurement.of(
        "onnxruntime",
        arguments.prompts,
        model.greedy(prompts, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=folder.glob("*.onnx"),
    ).print()


if __name__ == "__main__":
    main()
