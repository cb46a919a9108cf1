"""Ranks that share a model with native kernels, as processes without a launcher: each a part of the
model that `parts_of` makes, for test_ranks.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lite_runner.architectures import parameters
from lite_runner.architectures.quantization import Quantization
from lite_runner.architectures.spec import Decoder
from lite_runner.backends import Backend, Row
from lite_runner.backends.native.backend import NativeBackend
from lite_runner.config.sections import Ranks
from lite_runner.errors import RunnerError
from lite_runner.native import peers as native_peers
from lite_runner.native.model import NativeOptions
from lite_runner.native.packed_model import pack
from lite_runner.native.peers import meet_peers
from lite_runner.native.structs import WHOLE, Share
from lite_runner.records import dataclass
from lite_runner.weights import LazyBlocks, LazyTensor
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from lite_runner.weights.formats.gguf_blocks import BlockMatrix
from lite_runner.weights.layouts import random_checkpoint
from lite_runner.weights.lora.adapter import Adapter, LoraPair, pool_size
from lite_runner.weights.lora.adapter_shards import adapter_pieces
from lite_runner.weights.quantization.quantize import with_quantization
from lite_runner.weights.read_ahead import QuantizedWeights
from lite_runner.weights.sharding.partition import pieces
from tests.paths import REFERENCE


@dataclass(frozen=True)
class Case:
    """A model, and how ranks share it."""

    name: str  # of a reference; "wide": see `wide_model`
    ranks: int = 2
    vocab_parallel: bool = True
    quant: str = "none"  # "a16": `down` in blocks of Q4_K, other matrices of Q8_0
    adapters: bool = False
    elsewhere: bool = False  # the others are on other machines


def model_of(case: Case) -> tuple[Decoder, Mapping[str, LazyTensor]]:
    """The whole model."""
    if case.name == "wide":
        config, tensors = wide_model()
    else:
        found = model_config_of(REFERENCE / case.name)
        assert found is not None
        config, tensors = found, open_checkpoint(REFERENCE / case.name, found)
    group = 32 if case.quant == "a16w4" else 0
    return config, with_quantization(tensors, config, Quantization(case.quant, group))  # type: ignore[arg-type]


def wide_model() -> tuple[Decoder, Mapping[str, LazyTensor]]:
    """A Llama whose feed-forward width in halves is one and a half blocks of 256."""
    found = model_config_of(REFERENCE / "llama_biases")
    assert found is not None
    blocks = tuple(
        replace(one, feed_forward=replace(one.feed_forward, width=768)) for one in found.blocks
    )
    config = replace(found, blocks=blocks)
    tensors = dict(random_checkpoint(config, 3, "F32"))
    for one in parameters(config):
        if one.layout == "out_in":
            tensors[one.name] = _in_blocks(tensors[one.name], one.role == "down")
    return config, tensors


def _in_blocks(tensor: LazyTensor, wide: bool) -> LazyTensor:
    from gguf import GGMLQuantizationType, quants

    values = tensor.float32()
    if wide:
        generator = np.random.default_rng(values.size)
        data = generator.integers(0, 256, (len(values), values.shape[1] // 256, 144), np.uint8)
        data[..., :4] = np.float16([2e-4, 2e-3]).view(np.uint8)
        name, data = "Q4_K", data.reshape(len(values), -1)
    else:
        name, data = "Q8_0", quants.quantize(values, GGMLQuantizationType.Q8_0)
    matrix = BlockMatrix(name, data, values.shape[1])
    own = LazyBlocks(name, data.nbytes, lambda: matrix)
    return LazyTensor(values.shape, "F32", matrix.float32, block_type=name, blocks=own)


def adapters_of(config: Decoder) -> list[Adapter]:
    """Two of all matrices."""

    def adapter(seed: int) -> Adapter:
        generator = np.random.default_rng(seed)

        def held(*shape: int) -> LazyTensor:
            values = generator.standard_normal(shape, np.float32) / 8
            return LazyTensor(shape, "F32", lambda: values)

        pairs = {}
        for one in parameters(config):
            if one.layout != "plain" or one.split == "vocabulary":
                out, inputs = one.shape[::-1] if one.layout == "in_out" else one.shape
                if one.role == "embedding":
                    out, inputs = inputs, out
                pairs[one.name] = LoraPair(held(3, inputs), held(out, 3), 1.0)
        return Adapter(f"adapter{seed}", Path(f"adapter{seed}"), pairs)

    return [adapter(1), adapter(2)]


def backend_of(
    case: Case, ranks: Ranks, gather: Callable[[str], list[str]] | None = None
) -> Backend:
    """The backend of a rank, or with one rank of the whole model."""
    config, tensors = model_of(case)
    peers = None
    if gather is not None:
        share = Share(ranks.tensor_index, ranks.tensor, case.vocab_parallel)
        if case.elsewhere:
            native_peers._opened = _not_there  # a process of its own
        first = ranks.data_index * ranks.tensor

        def collective(own: NDArray[np.float32]) -> NDArray[np.float32]:
            every = [bytes.fromhex(text) for text in gather(own.tobytes().hex())]
            found = every[first : first + ranks.tensor]
            return np.stack([np.frombuffer(one, np.float32) for one in found])

        peers = meet_peers(share, gather, first, lambda: collective)
        assert (peers.all_gather is not None) == case.elsewhere
        tensors = pieces(tensors, config, ranks, vocab_parallel=case.vocab_parallel)
    adapters = [
        adapter_pieces(one, config, ranks, vocab_parallel=case.vocab_parallel)
        for one in (adapters_of(config) if case.adapters else ())
    ]
    options = NativeOptions(slots=4, length=64, lora=pool_size(adapters, 2) if adapters else None)
    weights = QuantizedWeights(tensors, config)
    share = WHOLE if peers is None else peers.share
    layers = pack(config, weights, options.lora, share=share)
    return NativeBackend(config, layers, options, adapters, threads=1, peers=peers)


def _not_there(*_: Any) -> int:
    raise FileNotFoundError


def logits_of(backend: Backend, prompts: Sequence[NDArray], forced: NDArray) -> NDArray[np.float32]:
    """[prompts, steps + 1, vocab]: all prompts together, each with an adapter if there are some,
    then the forced tokens."""
    places = [-1] * len(prompts)
    if backend.adapters is not None:
        names = [None, "adapter1", "adapter2", None]
        found = [None if name is None else backend.adapters.pin(name) for name in names]
        places = [-1 if one is None else one for one in found][: len(prompts)]
    rows = [Row(slot, prompt, 0, adapter_slot=places[slot]) for slot, prompt in enumerate(prompts)]
    logits = [np.array(backend.forward(rows))]
    for step in range(forced.shape[1]):
        rows = [
            Row(slot, forced[slot, step : step + 1], len(prompt) + step, adapter_slot=places[slot])
            for slot, prompt in enumerate(prompts)
        ]
        logits.append(np.array(backend.forward(rows)))
    return np.stack(logits, axis=1)


def prompts_of(case: Case) -> tuple[list[NDArray], NDArray]:
    """Prompts and the tokens behind them."""
    known = np.load(
        REFERENCE / ("llama_biases" if case.name == "wide" else case.name) / "expected.npz"
    )
    pairs = zip(known["prompts"], known["lengths"], strict=True)
    prompts = [row[:length].astype(np.int32) for row, length in pairs]
    return prompts, known["continuations"].astype(np.int32)


def compute(case: Case, ranks: Ranks, gather: Callable[[str], list[str]]) -> NDArray[np.float32]:
    """A rank's logits, twice the same."""
    backend = backend_of(case, ranks, gather)
    first, second = (logits_of(backend, *prompts_of(case)) for _ in range(2))
    backend.close()
    assert first.tobytes() == second.tobytes()
    return first


def leave(case: Case, ranks: Ranks, gather: Callable[[str], list[str]]) -> str:
    """The second rank leaves; the error of the first one."""
    native_peers.PATIENCE_S = 0.2
    backend = backend_of(case, ranks, gather)
    if ranks.rank == 1:
        return "left"
    try:
        backend.forward([Row(0, np.arange(5, dtype=np.int32), 0)])
    except RunnerError as error:
        return error.message
    return "nothing"


Work = Callable[[Case, Ranks, Callable[[str], list[str]]], Any]


def run_ranks(size: int, work: Sequence[tuple[Work, Case]]) -> list[list[Any]]:
    """The results of each of `size` processes, by work."""
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(theirs, rank, size, work))
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process in processes:
        process.start()
    for _, theirs in ends:
        theirs.close()
    hubs = [own for own, _ in ends]
    try:
        while True:
            answers = [hub.recv() for hub in hubs]
            if all(kind == "done" for kind, _ in answers):
                return [list(found) for found in zip(*(one for _, one in answers), strict=True)]
            for hub in hubs:
                hub.send([one for _, one in answers])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(hub: Connection, rank: int, size: int, work: Sequence[tuple[Work, Case]]) -> None:
    def gather(text: str) -> list[str]:
        hub.send(("gather", text))
        found: list[str] = hub.recv()
        return found

    found = []
    for task, case in work:
        found.append(task(case, Ranks(rank, size // case.ranks, case.ranks), gather))
    hub.send(("done", found))
    hub.recv()  # until the others are done
