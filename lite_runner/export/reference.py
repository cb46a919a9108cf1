"""The online backend that an exported model is verified against."""

from __future__ import annotations

from collections.abc import Mapping

from lite_runner import native
from lite_runner.architectures.spec import Decoder
from lite_runner.backends.base import Backend
from lite_runner.export.job import ExportJob
from lite_runner.mindir.manifest import Operators
from lite_runner.native.packed_model import unsupported
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.tensor import LazyTensor


def reference_backend(job: ExportJob, length: int) -> Backend:
    """One slot of `length` tokens: with the operators of the export, else in float32.

    In float32 this project's operators compute where they can: their graph compiles in a tenth of a
    second, those of MindSpore's operators take as long as the export itself.
    """
    files, ranks, vocab_parallel = job.files, job.ranks, job.spec.vocab_parallel
    if job.spec.operators is not None:
        operators = None if job.spec.operators.quant == "none" else job.spec.operators
        return _native(files.model, files.tensors(), operators, length)
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


def _native(
    model: Decoder, tensors: Mapping[str, LazyTensor], operators: Operators | None, length: int
) -> Backend:
    from lite_runner.backends.native_compiled import NativeOptions, open_compiled

    if operators is None:
        options = NativeOptions(1, length, dequantize=True)
    else:
        rounds = operators.quant == "a8w8"
        options = NativeOptions(1, length, cache=operators.kv_cache, integer_input=rounds)
    weights = QuantizedWeights(tensors, model)
    try:
        return open_compiled(model, weights, options)
    finally:
        weights.close()
