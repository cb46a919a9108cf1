"""The graph of quantized weights: one call of this project's own operators a layer."""

from __future__ import annotations

from pathlib import Path

from lite_runner import progress
from lite_runner.export.job import ExportJob
from lite_runner.mindir.manifest import Graph, GraphName, Operators
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.read_ahead import QuantizedWeights


def write_native_graph(
    folder: Path, job: ExportJob, operators: Operators
) -> tuple[dict[GraphName, Graph], Operators]:
    """Write the graph; also gives the operators with the format that its layers have."""
    from lite_runner.backends.batch_metadata import BatchMetadata
    from lite_runner.mindir.write_native import export_native

    files, spec = job.files, job.spec
    metadata = BatchMetadata(files.model, spec.length, operators.capacity)
    tensors = files.tensors()
    progress.note(describe(tensors, files.quantization))
    weights = QuantizedWeights(tensors, files.model)
    try:
        return export_native(
            files.model,
            weights,
            folder,
            job.config.model_name,
            slots=spec.slots,
            seq_length=spec.length,
            operators=operators,
            inputs=metadata.specs(spec.slots),
        )
    finally:
        weights.close()
