"""Speed of prefill: its share of the machine's peak, and the share of attention in the time.

    .venv/bin/python benchmarks/prefill.py [options] [overrides, e.g. model=FOLDER]

Random weights in float32, of SmolLM2-135M's sizes unless told otherwise. Products: a step's rows
times the matrices of a block, without the rest. Peak: multiply-adds of numbers in registers.
Attention: what a prompt takes longer than the same tokens as prompts of 32. Seconds are CPU time
divided by the threads, so that other processes do not count; a round measures everything in turn,
and figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from lite_runner import native, progress
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.config.argv import parse
from lite_runner.model.locate import locate
from lite_runner.native import matrices
from lite_runner.native.fingerprint import compiler
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.run_modes import heads, resolve
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.read_ahead import QuantizedWeights

SHORT = 32  # tokens of the prompts whose attention hardly counts
STEP = 512  # tokens that go through a block together
MULTIPLY_ADDS = """
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
constexpr int kSums = 12;  // none has to be waited for
typedef float Lanes __attribute__((vector_size(kBytes)));

extern "C" int lanes() { return kSums * kBytes / 4; }
extern "C" float multiply_adds(long count, float factor, float added) {
  Lanes sums[kSums], x = factor - Lanes{}, y = added - Lanes{};
  for (int sum = 0; sum < kSums; ++sum) sums[sum] = static_cast<float>(sum) - Lanes{};
  for (long i = 0; i < count; ++i)
#pragma GCC unroll 12
    for (int sum = 0; sum < kSums; ++sum) sums[sum] = sums[sum] * x + y;
  for (int sum = 1; sum < kSums; ++sum) sums[0] += sums[sum];
  return sums[0][0];
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("overrides", nargs="*", help="settings, e.g. model=FOLDER")
    arguments = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    threads = arguments.threads
    model = model_of(arguments.overrides)
    backend = opened(model, max(arguments.prompts), threads)
    products, multiplied = Products(model), peak(threads)

    rates, shares = [], []
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        highest = multiplied()
        rates.append(products.count / seconds(products.run, threads) / 1e9)
        shares.append(rates[-1] / highest)
        for tokens in arguments.prompts:
            for name, run in (("long", one_prompt), ("short", short_prompts)):
                spent = seconds(partial(run, backend, tokens), threads)
                taken.setdefault((name, tokens), []).append(spent)
    print(
        f"{backend.info.engine}, {threads} threads: products of {STEP} rows make "
        f"{statistics.median(rates):.1f} GMAC/s, {statistics.median(shares):.0%} of the peak\n\n"
        "| prompt, tokens | tokens/s | attention |\n|---|---|---|"
    )
    for tokens in arguments.prompts:
        long, short = taken["long", tokens], taken["short", tokens]
        parts = [1 - one / other for one, other in zip(short, long, strict=True)]
        rate = tokens / statistics.median(long)
        print(f"| {tokens} | {rate:.0f} | {statistics.median(parts):.0%} |")


def model_of(overrides: Sequence[str]) -> Decoder:
    """The sizes of the model that a run with these settings has."""
    settings = ["model=smollm2_135m", "predict_data=ids", *overrides]
    config, _ = resolve(parse(settings, heads()))
    progress.configure(verbosity=0)
    return locate(config.source).model


def opened(model: Decoder, length: int, threads: int) -> NativeBackend:
    """Prompts of `length` tokens, or a step of short ones, fit."""
    weights = QuantizedWeights(random_checkpoint(model, 0), model)
    layers = list(pack(model, weights))
    weights.close()
    options = NativeOptions(slots=STEP // SHORT, length=max(length, SHORT))
    return NativeBackend(model, layers, options, threads=threads)


class Products:
    """A step's rows times the matrices of a model's first block."""

    def __init__(self, model: Decoder) -> None:
        block = model.blocks[0]
        attention, wide, hidden = block.attention, block.feed_forward.width, model.hidden_size
        queries = attention.heads * attention.head_dim
        keys = attention.kv_heads * attention.head_dim
        up = (2 if block.feed_forward.gated else 1) * wide
        shapes = [(queries + 2 * keys, hidden), (hidden, queries), (up, hidden), (hidden, wide)]
        self.count = STEP * sum(out * inputs for out, inputs in shapes)
        random = np.random.default_rng(0)
        self._calls = []
        for out, inputs in shapes:
            block_bytes = matrices.matrix(random.standard_normal((out, inputs), np.float32)).block()
            x = random.standard_normal((STEP, inputs), np.float32)
            self._calls.append((block_bytes, x, np.empty((STEP, out), np.float32)))

    def run(self) -> None:
        for block, x, result in self._calls:
            native.library().lite_runner_linear(
                ctypes.c_void_p(block.ctypes.data),
                ctypes.c_void_p(x.ctypes.data),
                ctypes.c_int64(STEP),
                ctypes.c_void_p(result.ctypes.data),
            )


def one_prompt(backend: NativeBackend, tokens: int) -> None:
    backend.forward([Row(0, np.zeros(tokens, np.int32), 0)])


def short_prompts(backend: NativeBackend, tokens: int) -> None:
    """As many tokens in all."""
    for start in range(0, tokens, STEP):
        here = min(STEP, tokens - start)
        lengths = [min(SHORT, here - first) for first in range(0, here, SHORT)]
        rows = [Row(i, np.zeros(size, np.int32), 0, logits=0) for i, size in enumerate(lengths)]
        backend.forward([*rows[:-1], Row(len(rows) - 1, rows[-1].tokens, 0)])


def seconds(run: Callable[[], None], threads: int) -> float:
    """CPU time that each of the threads has spent."""
    began = time.process_time()
    run()
    return (time.process_time() - began) / threads


def peak(threads: int) -> Callable[[], float]:
    """A function that measures 1e9 multiply-adds/s of so many threads."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "peak.cc"), Path(folder, "peak.so")
        source.write_text(MULTIPLY_ADDS)
        flags = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        subprocess.run([*compiler(), *flags, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
    count = 5_000_000

    def rate(_: int) -> float:
        began = time.thread_time()
        library.multiply_adds(ctypes.c_long(count), ctypes.c_float(0.5), ctypes.c_float(1))
        return float(count * library.lanes() / (time.thread_time() - began) / 1e9)

    def measure() -> float:
        with ThreadPoolExecutor(threads) as pool:
            return sum(pool.map(rate, range(threads)))

    return measure


if __name__ == "__main__":
    main()
