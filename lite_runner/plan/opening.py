"""Opening an online backend: weights are read while MindSpore is imported."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import cache

from lite_runner.backends.base import Backend
from lite_runner.config.options import ComputeOptions
from lite_runner.config.ranks import Ranks
from lite_runner.model.files import ModelFiles
from lite_runner.plan.capacity import Capacity
from lite_runner.plan.operators import uses_integer_matmul
from lite_runner.system import environment, memory
from lite_runner.weights.read_ahead import QuantizedWeights, ReadAhead
from lite_runner.weights.tensor import LazyTensor


@cache
def _freeze_imports() -> None:
    """Exclude imported objects from the garbage collection that MindSpore runs at each compile.

    Once per process, so that models loaded later can still be collected.
    """
    gc.freeze()


@memory.large_blocks_returned()
def open_backend(
    config: ComputeOptions,
    files: ModelFiles,
    device: str,
    ranks: Ranks,
    tensors: Mapping[str, LazyTensor],
    capacity: Capacity,
    advance: Callable[[int], None],
    *,
    native: bool,
) -> Backend:
    """The backend with its weights; `native`: as `resolve_operators` returns. `advance` is called
    with the number of tensors read."""
    weights: ReadAhead | QuantizedWeights
    if native or uses_integer_matmul(config, files, device, ranks):
        weights = QuantizedWeights(tensors, files.model, advance)
    else:
        weights = ReadAhead(tensors, advance)
    try:
        environment.import_mindspore()  # while threads read the first weights
        _freeze_imports()
        if native:
            from lite_runner.backends.native_compiled import NativeOptions, open_compiled

            assert isinstance(weights, QuantizedWeights)
            options = NativeOptions(
                slots=capacity.slots,
                length=capacity.length,
                cache=config.kv_cache,
                rounded_input=files.bfloat16_input or files.quantization.rounds_inputs,
                lora=capacity.lora,
                dequantize=files.quantization.quant == "none",
            )
            return open_compiled(
                files.model, weights, options, capacity.adapters, threads=config.context.threads
            )
        from lite_runner.backends.mindspore import MindSporeBackend, MindSporeOptions

        settings = MindSporeOptions(
            slots=capacity.slots,
            length=capacity.length,
            dtype=config.compute_dtype(device),
            device=device,
            device_id=config.context.device_id,
            threads=config.context.threads,
            use_past=config.use_past,
            pynative=config.context.mode == 1,
            ranks=ranks,
            vocab_parallel=config.vocab_parallel,
            lora=capacity.lora,
            integer_input=files.quantization.rounds_inputs,
        )
        return MindSporeBackend(files.model, weights, settings, capacity.adapters)
    finally:
        weights.close()
