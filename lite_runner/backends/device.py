"""The device that MindSpore computes on."""

from __future__ import annotations

import mindspore as ms

from lite_runner.errors import EnvironmentFault


def set_device(device: str, device_id: int, threads: int | None = None) -> None:
    """Point MindSpore at the device; an absent one is an EnvironmentFault.

    `threads` None is MindSpore's own choice.
    """
    jit_config = {"jit_level": "O0"}
    if device == "Ascend":
        jit_config["infer_boost"] = "on"  # PagedAttention and ReshapeAndCache are of these kernels
    ms.set_context(mode=ms.GRAPH_MODE, jit_config=jit_config)
    try:
        ms.set_device(device, device_id)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"context.device_target={device}: MindSpore {ms.__version__} here has no such "
            f"device ({str(error).strip().splitlines()[0]})",
            "run on this machine's processor with context.device_target=CPU",
        ) from error
    if threads is not None:
        ms.set_context(runtime_num_threads=threads)
