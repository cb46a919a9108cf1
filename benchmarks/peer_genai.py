"""One process of onnxruntime-genai on SmolLM2; prints one line of JSON.

The first run of a type has its model builder make the graphs from a Hugging Face folder. The loop,
the cache and the choice of tokens are its own, token ids go in and out. Its defaults, but the
vocabulary is computed for the last token of a prompt alone, as everybody else does. Its int4 is in
groups of 32 with int8 activations, the head too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime_genai
from measure import Measurement, engine_parser, restart, seconds_since_start
from numpy.typing import NDArray

TYPES = ("fp32", "int4")

Ids = NDArray[np.int32]


def build(source: Path, target: Path, kind: str) -> None:
    """Make the graphs; the folder gets its name when it is whole."""
    unfinished = target.with_name(target.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", kind]
    with tempfile.TemporaryDirectory() as cache:
        files = ["-i", str(source), "-o", str(unfinished), "-c", cache]
        options = ["--extra_options", "prune_lm_head=true", "hf_token=false"]
        done = subprocess.run([*command, *files, *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{source}: the builder ended in {done.returncode}:\n{done.stderr[-4000:]}")
    unfinished.replace(target)


def greedy(model: onnxruntime_genai.Model, prompts: Ids, new_tokens: int) -> Iterator[Ids]:
    """The next token of every row, new_tokens times; no end token stops a row."""
    parameters = onnxruntime_genai.GeneratorParams(model)
    total = prompts.shape[1] + new_tokens
    # From a least length on, the end token is never chosen: all engines make as many tokens.
    parameters.set_search_options(
        batch_size=len(prompts), do_sample=False, max_length=total, min_length=total
    )
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(prompts)
    for _ in range(new_tokens):
        generator.generate_next_token()
        yield generator.get_next_tokens()


def main() -> None:
    parser = engine_parser(__doc__)
    parser.add_argument("--huggingface", type=Path, required=True, help="folder of the model")
    parser.add_argument("--type", choices=TYPES, default="fp32")
    parser.add_argument("--made", type=Path, required=True, help="folder to keep graphs in")
    arguments = parser.parse_args()

    key = hashlib.sha256(str(arguments.huggingface.resolve()).encode()).hexdigest()[:8]
    folder = arguments.made / f"{arguments.huggingface.name}-{key}-{arguments.type}"
    if not folder.exists():
        build(arguments.huggingface, folder, arguments.type)
        restart()

    prompts = np.array(arguments.prompts, np.int32)
    started = time.perf_counter()
    config = onnxruntime_genai.Config(str(folder))
    session = {"intra_op_num_threads": arguments.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = onnxruntime_genai.Model(config)
    load_s = time.perf_counter() - started
    next(greedy(model, prompts, arguments.new_tokens))
    first_token_s = seconds_since_start()

    Measurement.of(
        f"onnxruntime-genai {arguments.type}",
        arguments.prompts,
        greedy(model, prompts, arguments.new_tokens),
        first_token_s=first_token_s,
        load_s=load_s,
        files=folder.glob("model.onnx*"),
    ).print()


if __name__ == "__main__":
    main()
