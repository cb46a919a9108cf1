"""Writing a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lite_runner import progress
from lite_runner.model.files import ModelFiles
from lite_runner.system.files import atomic_write, new_folder, require_space
from lite_runner.weights.quantization.quantize import describe
from lite_runner.weights.quantization.quantized_checkpoint import (
    QuantizationManifest,
    weights_bytes,
    write_quantized,
)


def quantize(files: ModelFiles, beside: Mapping[str, bytes], target: Path) -> int:
    """Write the weights as files.quantization has them, and other files `beside` them; returns the
    bytes of the weights. Raises RunnerError; `target` is written atomically."""
    tensors = files.whole()
    schemes = {
        name: tensor.integers.scheme
        for name, tensor in tensors.items()
        if tensor.integers is not None
    }
    manifest = QuantizationManifest(files.quantization, files.source, schemes)
    size = weights_bytes(files.model, manifest)
    progress.note(describe(tensors, files.quantization))
    with new_folder(target) as fresh:
        require_space(fresh, size)
        with progress.step("quantize", total=len(tensors), unit="tensors") as step:
            write_quantized(fresh, tensors, files.model, manifest, step.advance)
        for name, content in beside.items():
            with atomic_write(fresh / name) as file:
                file.write(content)
    return size
