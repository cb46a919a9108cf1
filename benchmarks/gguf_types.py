"""Perplexity and decoding of GGUF's block types beside llama.cpp, as rows of a Markdown table.

    .venv-bench/bin/python benchmarks/gguf_types.py --gguf MODEL.gguf --imatrix imatrix.gguf \
        --text tests/fixtures/text/lighthouse.txt --made FOLDER [--types IQ3_XXS TQ2_0]

llama.cpp writes each file from MODEL.gguf, with the importance matrix that some types need; rows
that are no multiple of 256 get types of blocks of 32 there. The perplexity is that of the first 256
tokens. Milliseconds are of processor time a token in one thread, the least of three runs: of 16
tokens that are decoded behind 128, and of these as a prompt.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
SCORED, BEFORE, PARTS, PART = 256, 128, 3, 16
MXFP4 = 39  # of ggml's types; llama.cpp's own mix has it for experts alone
TYPES = ("MXFP4", "IQ3_S", "IQ3_XXS", "IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S")
TYPES += ("TQ2_0", "TQ1_0")
Floats = NDArray[np.float32]
Forward = Callable[[list[int], int, bool], Floats]  # tokens, their position, all logits


def made(arguments: argparse.Namespace, kind: str) -> Path:
    """A file of that type, written by llama.cpp."""
    import llama_cpp
    from gguf import GGUFReader

    path = Path(arguments.made) / f"{kind}.gguf"
    if path.exists():
        return path
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.allow_requantize = True
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{'Q4_0' if kind == 'MXFP4' else kind}")
    structs = llama_cpp.llama_cpp
    if kind == "MXFP4":
        overrides = (structs.llama_model_tensor_override * 2)()
        overrides[0].pattern, overrides[0].type = b"blk\\..*", MXFP4
        settings.tt_overrides = overrides
    kept = []  # what the pointers lead to
    entries = {}
    tensors = {one.name: one.data for one in GGUFReader(arguments.imatrix).tensors}
    for name, sums in tensors.items():
        if name.endswith(".in_sum2"):
            counts = tensors[name.removesuffix("in_sum2") + "counts"]
            values = np.ascontiguousarray((sums / counts).ravel(), np.float32)
            entries[name.removesuffix(".in_sum2").encode()] = values
    matrix = (structs.llama_model_imatrix_data * (len(entries) + 1))()
    for one, (name, values) in zip(matrix, entries.items(), strict=False):
        kept.append(values)
        one.name, one.size = name, values.size
        one.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    settings.imatrix = matrix
    paths = (str(one).encode() for one in (arguments.gguf, path))
    if llama_cpp.llama_model_quantize(*paths, ctypes.byref(settings)):
        sys.exit(f"{arguments.gguf}: llama.cpp cannot make it {kind}")
    return path


def of_llama_cpp(path: Path) -> Forward:
    """llama.cpp's logits."""
    import llama_cpp

    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_threads = options.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, options)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(512, 0, 1)

    def forward(tokens: list[int], position: int, every: bool) -> Floats:
        if position == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = every or place == len(tokens) - 1
        if llama_cpp.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        rows = len(tokens) if every else 1
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (rows, vocab)).copy()

    return forward


def of_ours(path: Path) -> Forward:
    """This project's logits."""
    sys.path.insert(0, str(ROOT))
    from lite_runner.backends import Row
    from lite_runner.backends.native.backend import NativeBackend, NativeOptions
    from lite_runner.backends.native.packed_cache import packed_model
    from lite_runner.config.argv import parse
    from lite_runner.config.sections import Ranks
    from lite_runner.model.locate import locate
    from lite_runner.run_modes import heads, resolve

    config, _ = resolve(
        parse([f"model={path}", "quant=a16", "predict_data=x", "verbosity=0"], heads())
    )
    files = locate(config.source)
    layers = packed_model(files, None, name=files.source, cached=False, ranks=Ranks())
    options = NativeOptions(slots=1, length=512)
    backend = NativeBackend(files.model, layers, options, threads=1)

    def forward(tokens: list[int], position: int, every: bool) -> Floats:
        ids = np.array(tokens, np.int32)
        return backend.forward([Row(0, ids, position, logits=len(ids) if every else 1)])

    return forward


def measured(forward: Forward, tokens: list[int]) -> dict[str, float]:
    """Perplexity, and milliseconds of processor time a token of decoding and of a prompt."""
    logits = forward(tokens, 0, True).astype(np.float64)[:-1]
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    perplexity = np.exp(-logits[np.arange(len(tokens) - 1), tokens[1:]].mean())
    prefill, decode = [], []
    for _ in range(PARTS):
        times = [time.process_time()]
        forward(tokens[:BEFORE], 0, False)
        times.append(time.process_time())
        for place in range(BEFORE, BEFORE + PART):
            forward(tokens[place : place + 1], place, False)
        times.append(time.process_time())
        prefill.append((times[1] - times[0]) / BEFORE)
        decode.append((times[2] - times[1]) / PART)
    found = {"decode": 1e3 * min(decode), "prefill": 1e3 * min(prefill)}
    return {"perplexity": float(perplexity), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("gguf", "imatrix", "text", "made"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--measure", choices=("llama.cpp", "ours"), help="one file, of token ids")
    arguments = parser.parse_args()
    if arguments.measure:
        forward = {"llama.cpp": of_llama_cpp, "ours": of_ours}[arguments.measure]
        found = measured(forward(Path(arguments.gguf)), json.load(sys.stdin))
        print(json.dumps(found))
        return
    import llama_cpp

    quiet = llama_cpp.Llama(arguments.gguf, vocab_only=True, verbose=False)
    text = Path(arguments.text).read_bytes()
    tokens = json.dumps(quiet.tokenize(text, add_bos=False)[:SCORED])
    pythons = {"llama.cpp": sys.executable, "ours": str(ROOT / ".venv/bin/python")}
    print("| | MB | perplexity: llama.cpp | ours | decode: llama.cpp | ours | prefill: ", end="")
    print("llama.cpp | ours |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in arguments.types:
        path = made(arguments, kind)
        both = [
            json.loads(
                subprocess.run(
                    [python, __file__, "--measure", who, "--gguf", path],
                    input=tokens,
                    capture_output=True,
                    text=True,
                    check=True,
                ).stdout.splitlines()[-1]
            )
            for who, python in pythons.items()
        ]
        figures = [f"{one[what]:.2f}" for what in both[0] for one in both]
        size = path.stat().st_size / 1e6
        print(f"| {kind} | {size:.1f} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
