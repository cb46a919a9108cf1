"""One process of onnxruntime-genai on SmolLM2; prints one line of JSON.

The first run of a type has its model builder make the graphs from a Hugging Face folder. The loop,
the cache and the choice of tokens are its own, token ids go in and out. Its defaults, but the
vocabulary is computed for the last token of a prompt alone, as everybody else does. Its int4 is in
groups of 32 with int8 activations, the head too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime_genai
from measure import Measurement, mebibytes, peak_rss_mib, seconds_since_start
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


def generator(
    model: onnxruntime_genai.Model, prompts: Ids, new_tokens: int
) -> onnxruntime_genai.Generator:
    """Greedy decoding of prompts [rows, length], with the first token of each row chosen."""
    parameters = onnxruntime_genai.GeneratorParams(model)
    total = prompts.shape[1] + new_tokens
    # From a least length on, the end token is never chosen: all engines make as many tokens.
    parameters.set_search_options(
        batch_size=len(prompts), do_sample=False, max_length=total, min_length=total
    )
    result = onnxruntime_genai.Generator(model, parameters)
    result.append_tokens(prompts)
    result.generate_next_token()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--huggingface", type=Path, required=True, help="folder of the model")
    parser.add_argument("--type", choices=TYPES, default="fp32")
    parser.add_argument("--made", type=Path, required=True, help="folder to keep graphs in")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON: a list of ids a row")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()

    key = hashlib.sha256(str(arguments.huggingface.resolve()).encode()).hexdigest()[:8]
    folder = arguments.made / f"{arguments.huggingface.name}-{key}-{arguments.type}"
    if not folder.exists():
        build(arguments.huggingface, folder, arguments.type)
        sys.exit(subprocess.run([sys.executable, *sys.argv]).returncode)  # a clean process

    prompts = np.array(json.loads(arguments.prompts.read_text()), np.int32)
    batch, length = prompts.shape
    started = time.perf_counter()
    config = onnxruntime_genai.Config(str(folder))
    session = {"intra_op_num_threads": arguments.threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = onnxruntime_genai.Model(config)
    load_s = time.perf_counter() - started
    generator(model, prompts, arguments.new_tokens)
    first_token_s = seconds_since_start()

    started = time.perf_counter()
    rows = generator(model, prompts, arguments.new_tokens)
    prefilled = time.perf_counter()
    for _ in range(arguments.new_tokens - 1):
        rows.generate_next_token()
    decoded = time.perf_counter()

    Measurement(
        engine=f"onnxruntime-genai {arguments.type}",
        batch=batch,
        prompt_tokens=length,
        new_tokens=arguments.new_tokens,
        first_token_s=first_token_s,
        load_s=load_s,
        prefill_tok_s=batch * length / (prefilled - started),
        decode_tok_s=batch * (arguments.new_tokens - 1) / (decoded - prefilled),
        peak_rss_mib=peak_rss_mib(),
        disk_mib=mebibytes(folder.glob("model.onnx*")),
        token_ids=[rows.get_sequence(row)[length:].tolist() for row in range(batch)],
    ).print()


if __name__ == "__main__":
    main()
