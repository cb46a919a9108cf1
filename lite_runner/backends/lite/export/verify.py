"""Verifies an exported model: its logits against the online backend's."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lite_runner import native, progress
from lite_runner.backends.base import Backend, Row
from lite_runner.backends.lite.export.job import ExportJob
from lite_runner.backends.lite.layouts import open_exported
from lite_runner.errors import ArtifactError
from lite_runner.mindir.manifest import Manifest
from lite_runner.native.packed_model import pack, unsupported
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead

# Of the largest logit. Lite's own rounding is a tenth of it; a wrong operator is far above.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}
FOREIGN = 1e-3  # Lite rounds more in the graphs of MindFormers 1.0.2: by up to 1.6e-4
PROBE_PROMPTS = (5, 18)  # tokens
PROBE_STEPS = 3
LENGTH = max(PROBE_PROMPTS) + PROBE_STEPS
PROBE_THREADS = (1, 2)


def verify(
    folder: Path,
    manifest: Manifest,
    job: ExportJob,
    *,
    hidden: Collection[int] = (),
    tolerance: float = 0.0,
) -> None:
    """Compare the artifact's logits with the online backend's: prompts of two lengths, some steps,
    each with one thread and with two; without `hidden` tokens, which the graph does not see. Of
    several ranks each calls this, for its graphs. Raises ArtifactError where they differ by more
    than the precision, or `tolerance`, allows."""
    prompts, engine = _probes(manifest, hidden), job.engine
    online = reference_backend(job, LENGTH)
    expected = _logits(online, prompts)
    online.close()
    limit = max(TOLERANCE[manifest.precision], tolerance)
    graphs = manifest.paths(folder, job.ranks.tensor_index)
    for threads in PROBE_THREADS:
        options = dataclasses.replace(engine, threads=threads)
        with progress.step(f"verify in {engine.name}, threads={threads}"):
            backend = open_exported(graphs, manifest, options, slots=1)
            try:
                got = _logits(backend, prompts)
            finally:
                backend.close()
        largest = np.abs(expected).max()
        if manifest.sampled:  # a 1 at the token it chose: how far is that one from the likeliest?
            error = float((expected.max(-1) - (expected * got).sum(-1)).max() / largest)
        else:
            error = float(np.abs(got - expected).max() / largest)
        if not error <= limit:  # NaN fails too
            raise ArtifactError(
                f"the exported {manifest.model_name} computes something else in {engine.name} with "
                f"threads={threads}: off by {error:.1e} of the largest logit, at most {limit:.0e} "
                "expected; it is not kept",
            )


def reference_backend(job: ExportJob, length: int) -> Backend:
    """One slot of `length` tokens. The native kernels compute where they can: MindSpore's graphs
    take as long to compile as the export itself."""
    files, ranks, vocab_parallel = job.files, job.ranks, job.spec.vocab_parallel
    tensors = files.resharded(ranks, vocab_parallel=vocab_parallel)
    if ranks.tensor == 1 and native.unusable() is None and not unsupported(files.model):
        from lite_runner.backends.native.backend import NativeBackend, NativeOptions

        integers = QuantizedWeights(tensors, files.model)
        try:
            layers = list(pack(files.model, integers, dequantize=True))
        finally:
            integers.close()
        return NativeBackend(files.model, layers, NativeOptions(1, length))
    from lite_runner.backends.mindspore.backend import MindSporeBackend, MindSporeOptions

    weights = ReadAhead(tensors)
    options = MindSporeOptions(slots=1, length=length, ranks=ranks, vocab_parallel=vocab_parallel)
    try:
        return MindSporeBackend(files.model, weights, options)
    finally:
        weights.close()


def _probes(manifest: Manifest, hidden: Collection[int]) -> list[NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    sizes = [min(size, manifest.seq_length - PROBE_STEPS) for size in PROBE_PROMPTS]
    seen = [token for token in range(manifest.model.vocab_size) if token not in hidden]
    return [generator.choice(seen, size + PROBE_STEPS).astype(np.int32) for size in sizes]


def _logits(backend: Backend, prompts: list[NDArray[np.int32]]) -> NDArray[np.float32]:
    """[prompts, steps + 1, vocab]: after each prompt and each of its last tokens, in one slot."""
    logits = []
    for tokens in prompts:
        start = len(tokens) - PROBE_STEPS
        pieces = [tokens[:start], *np.split(tokens[start:], PROBE_STEPS)]
        position = 0
        for piece in pieces:
            logits.append(backend.forward([Row(0, piece, position)])[0])
            position += len(piece)
    together: NDArray[np.float32] = np.stack(logits)
    return together.reshape(len(prompts), PROBE_STEPS + 1, -1)
