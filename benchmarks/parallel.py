"""Speed of two ranks that share a model, a thread each, and of one process with two threads.

    .venv/bin/python benchmarks/parallel.py [--rounds N]

SmolLM2-135M's sizes with 8 heads (its own 9 do not divide by 2), random weights, one sequence of
512 + 48 tokens. Both are in memory and take turns, so that what else the machine does slows both;
figures are medians over the rounds, and ratios of them. Greedy tokens are compared.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

import numpy as np
from random_gguf import Type, random_blocks

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend, Row
from lite_runner.backends.native.backend import NativeBackend, NativeOptions
from lite_runner.config.argv import parse
from lite_runner.config.sections import Ranks
from lite_runner.native.packed_model import pack
from lite_runner.native.peers import meet_peers
from lite_runner.native.structs import WHOLE, Share
from lite_runner.run_modes import heads, resolve
from lite_runner.weights import LazyBlocks, LazyTensor
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.read_ahead import QuantizedWeights
from lite_runner.weights.sharding.partition import pieces

RANKS, PROMPT, STEPS = 2, 512, 48
WEIGHTS = ("none", "a16w8", "a16w4", "Q4_K")
SIZES = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=a"]
SIZES += [f"model.model_config.{size}" for size in ("num_heads=8", "n_kv_heads=4", "head_dim=64")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    for weights in WEIGHTS:
        print(json.dumps(compared(weights, rounds)), flush=True)


def compared(weights: str, rounds: int) -> dict[str, object]:
    """Ranks and a single process, measured in turn."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(RANKS)]
    processes = [
        context.Process(target=serve, args=(theirs, rank, weights), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process, (_, theirs) in zip(processes, ends, strict=True):
        process.start()
        theirs.close()  # a rank that ends is the end of its pipe
    hubs = [own for own, _ in ends]
    while (said := [hub.recv() for hub in hubs]) != [None] * RANKS:
        for hub in hubs:
            hub.send(said)
    alone, found = opened(weights, RANKS), []
    for _ in range(rounds + 1):
        one = measured(alone)
        for hub in hubs:
            hub.send(True)
        found.append((one, max(hub.recv() for hub in hubs)))
    for hub, process in zip(hubs, processes, strict=True):
        hub.send(False)
        process.join()
    seconds = np.median([[one[:2], shared[:2]] for one, shared in found[1:]], axis=0)
    rates = np.array([PROMPT, 1]) / seconds
    return {
        "weights": weights,
        "prefill_tok_s": rates[:, 0].round(0).tolist(),
        "prefill_ratio": round(rates[1, 0] / rates[0, 0], 3),
        "decode_tok_s": rates[:, 1].round(1).tolist(),
        "decode_ratio": round(rates[1, 1] / rates[0, 1], 3),
        "tokens_equal": all(one[2] == shared[2] for one, shared in found),
    }


def serve(hub: Connection, rank: int, weights: str) -> None:
    """A rank: measures as often as it is asked."""

    def gather(text: str) -> list[str]:
        hub.send(text)
        said: list[str] = hub.recv()
        return said

    backend = opened(weights, 1, Ranks(rank, 1, RANKS), gather)
    hub.send(None)
    while hub.recv():
        hub.send(measured(backend))


def opened(
    weights: str,
    threads: int,
    ranks: Ranks | None = None,
    gather: Callable[[str], list[str]] | None = None,
) -> Backend:
    """The backend of the whole model, or of a rank."""
    model = resolve(parse(SIZES, heads()))[0].model_config()
    assert model is not None
    tensors, share, peers = tensors_of(model, weights), WHOLE, None
    if ranks is not None and gather is not None:
        share = Share(ranks.tensor_index, ranks.tensor)
        peers = meet_peers(share, gather, 0, _same_machine)
        tensors = pieces(tensors, model, ranks, vocab_parallel=True)
    layers = pack(model, QuantizedWeights(tensors, model), share=share)
    options = NativeOptions(slots=1, length=PROMPT + STEPS)
    return NativeBackend(model, layers, options, threads=threads, peers=peers)


def _same_machine() -> NoReturn:
    raise RuntimeError("the ranks have no memory in common")


def tensors_of(model: Decoder, weights: str) -> Mapping[str, LazyTensor]:
    """Random weights; Q4_K as in GGUF files of that name: what 256 does not divide is Q5_0, the
    vocabulary Q8_0."""
    tensors = dict(random_checkpoint(model, 1, "F32"))
    if weights != "Q4_K":
        quantization = Quantization(weights, 32 if weights == "a16w4" else 0)  # type: ignore[arg-type]
        return with_quantization(tensors, model, quantization)
    generator = np.random.default_rng(0)
    for one in parameters(model):
        if one.layout == "out_in" or one.split == "vocabulary":
            kind = Type.Q5_0 if one.shape[1] % 256 else Type.Q4_K
            kind = Type.Q8_0 if one.split == "vocabulary" else kind
            data = random_blocks(generator, one.shape, kind)
            matrix = BlockMatrix(kind.name, data, one.shape[1])
            own = LazyBlocks(kind.name, data.nbytes, lambda matrix=matrix: matrix)  # type: ignore[misc]
            tensors[one.name] = replace(tensors[one.name], block_type=kind.name, blocks=own)
    return with_quantization(tensors, model, Quantization("a16"))


def measured(backend: Backend) -> tuple[float, float, list[int]]:
    """Seconds of a prompt and of a decoding step, and the tokens."""
    prompt = (np.arange(PROMPT) * 7 % 40000).astype(np.int32)
    times, tokens = [], []
    for step in range(STEPS + 1):
        fed = prompt if step == 0 else np.array(tokens[-1:], np.int32)
        began = time.perf_counter()
        logits = backend.forward([Row(0, fed, PROMPT + step - 1 if step else 0)])
        times.append(time.perf_counter() - began)
        tokens.append(int(logits[-1].argmax()))
    return times[0], float(np.median(times[1:])), tokens


if __name__ == "__main__":
    main()
