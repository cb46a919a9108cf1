"""What writing an export takes: memory for the network and its graph, disk for every graph.

Packed layers have no graph: they are written as they are in memory.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lite_runner.export.spec import ExportSpec
from lite_runner.model.files import ModelFiles
from lite_runner.sizing.need import BYTES_OF, Memory, check_memory, export_need, memory_need
from lite_runner.system.files import require_space
from lite_runner.weights.tensor_bytes import native_bytes


def export_memory(files: ModelFiles, spec: ExportSpec) -> Memory:
    """Bytes that writing the export takes at its peak."""
    return export_need(_weights_and_cache(files, spec))


def check_room(folder: Path, files: ModelFiles, spec: ExportSpec) -> None:
    """Raises EnvironmentFault where memory, or the disk of `folder`, does not suffice."""
    need = _weights_and_cache(files, spec)
    check_memory(export_need(need))
    graphs = 2 if spec.layout == "static_pair" or spec.model_type == "mindir_lite" else 1
    require_space(folder, graphs * need.weights * BYTES_OF[spec.dtype] // BYTES_OF["float32"])


def packed_weights(files: ModelFiles) -> int:
    """Bytes of the model's packed layers."""
    dequantize = files.quantization.quant == "none"
    tensors = replace(files, verified=True).tensors()  # they are verified when they are read
    return sum(native_bytes(one, dequantize=dequantize).resident for one in tensors.values())


def _weights_and_cache(files: ModelFiles, spec: ExportSpec) -> Memory:
    """Of the network; a cache is in the graph where it is not fed."""
    need = memory_need(
        files.model, "float32", spec.slots, spec.length, quantization=files.quantization
    )
    return need if spec.layout != "packed" else replace(need, weights=packed_weights(files))
