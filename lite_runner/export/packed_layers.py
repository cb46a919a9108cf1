"""The packed layers of a model, for the native kernels without MindSpore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lite_runner import progress
from lite_runner.export.job import ExportJob
from lite_runner.mindir.manifest import Graph, GraphName
from lite_runner.native.packed_file import write_packed
from lite_runner.native.packed_model import packed_layers
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.read_ahead import QuantizedWeights


def write_packed_layers(folder: Path, job: ExportJob) -> tuple[dict[GraphName, Graph], ExportJob]:
    """Write the layers; also gives the job with the format that they have."""
    files, spec = job.files, job.spec
    assert spec.operators is not None
    tensors = files.tensors()
    if spec.operators.quant != "none":
        progress.note(describe(tensors, files.quantization))
    weights = QuantizedWeights(tensors, files.model)
    name = f"{job.config.model_name}.safetensors"
    try:
        layers = packed_layers(
            files.model,
            weights,
            integer_input=spec.operators.quant == "a8w8",
            dequantize=spec.operators.quant == "none",
        )
        with (folder / name).open("wb") as file:
            written = write_packed(file, files.model, layers)
    finally:
        weights.close()
    operators = replace(spec.operators, format=written)
    return {"model": Graph(name, (), ())}, replace(job, spec=replace(spec, operators=operators))
