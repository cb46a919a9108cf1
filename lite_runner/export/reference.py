"""The online backend that an exported model is verified against."""

from __future__ import annotations

from collections.abc import Mapping

from lite_runner import native
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Backend
from lite_runner.backends.native import NativeBackend
from lite_runner.export.job import ExportJob
from lite_runner.mindir.manifest import Operators
from lite_runner.native.model import NativeModel, NativeOptions
from lite_runner.native.packed_model import pack, unsupported
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.tensor import LazyTensor


def reference_backend(job: ExportJob, length: int) -> Backend:
    """One slot of `length` tokens: with the operators of the export, else in float32. Packed layers
    are packed once more, in memory, so that MindSpore need not be imported.

    In float32 this project's operators compute where they can: their graph compiles in a tenth of a
    second, those of MindSpore's operators take as long as the export itself.
    """
    files, ranks, vocab_parallel = job.files, job.ranks, job.spec.vocab_parallel
    if job.spec.layout == "packed":
        return _packed(job, length)
    if job.spec.operators is not None:
        return _native(files.model, files.tensors(), job.spec.operators, length)
    tensors = files.resharded(ranks, vocab_parallel=vocab_parallel)
    if ranks.tensor == 1 and native.unusable() is None and not unsupported(files.model):
        return _native(files.model, tensors, None, length)
    from lite_runner.backends.mindspore import MindSporeBackend, MindSporeOptions

    weights = ReadAhead(tensors)
    options = MindSporeOptions(slots=1, length=length, ranks=ranks, vocab_parallel=vocab_parallel)
    try:
        return MindSporeBackend(files.model, weights, options)
    finally:
        weights.close()


def _packed(job: ExportJob, length: int) -> Backend:
    model, operators = job.files.model, job.spec.operators
    assert operators is not None
    weights = QuantizedWeights(job.files.tensors(), model)
    try:
        layers = pack(
            model,
            weights,
            rounded_input=operators.rounded_input,
            dequantize=operators.quant == "none",
        )
    finally:
        weights.close()
    return NativeBackend(model, NativeModel(model, layers, 0), NativeOptions(1, length))


def _native(
    model: Decoder, tensors: Mapping[str, LazyTensor], operators: Operators | None, length: int
) -> Backend:
    from lite_runner.backends.native_compiled import open_compiled

    if operators is None:
        options = NativeOptions(1, length, dequantize=True)
    else:
        rounded = operators.rounded_input
        options = NativeOptions(1, length, cache=operators.kv_cache, rounded_input=rounded)
    weights = QuantizedWeights(tensors, model)
    try:
        return open_compiled(model, weights, options)
    finally:
        weights.close()
