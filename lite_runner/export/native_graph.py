"""What the native kernels run: a graph of quantized weights, or the packed layers alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from lite_runner import progress
from lite_runner.export.job import ExportJob
from lite_runner.mindir.manifest import Graph, GraphName, Operators
from lite_runner.native.packed_file import write_packed
from lite_runner.native.packed_model import packed_layers
from lite_runner.weights.quantization.quantize import block_types, describe, describe_blocks
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


def write_packed_layers(folder: Path, job: ExportJob) -> tuple[dict[GraphName, Graph], ExportJob]:
    """Write the layers; also gives the job with the format that they have."""
    files, spec = job.files, job.spec
    assert spec.operators is not None
    tensors = files.tensors()
    if types := block_types(tensors):
        progress.note(describe_blocks(types))
    elif spec.operators.quant != "none":
        progress.note(describe(tensors, files.quantization))
    weights = QuantizedWeights(tensors, files.model)
    name = f"{job.config.model_name}.safetensors"
    try:
        pack_in = partial(
            packed_layers,
            files.model,
            weights,
            rounded_input=spec.operators.rounded_input,
            dequantize=spec.operators.quant == "none",
        )
        with (folder / name).open("wb") as file:
            written = write_packed(file, files.model, lambda room: pack_in(room=room))
    finally:
        weights.close()
    operators = replace(spec.operators, format=written)
    return {"model": Graph(name, (), ())}, replace(job, spec=replace(spec, operators=operators))
