"""The device that MindSpore computes on."""

from __future__ import annotations

import mindspore as ms

from lite_runner.errors import EnvironmentFault


def set_device(
    device: str, device_id: int, threads: int | None = None, *, pynative: bool = False
) -> None:
    """Point MindSpore at the device; an absent one is an EnvironmentFault.

    `threads` None is MindSpore's own choice. With `pynative` operators run one by one, not as a
    compiled graph.
    """
    jit_config = {"jit_level": "O0"}
    if device == "Ascend":
        jit_config["infer_boost"] = "on"  # PagedAttention and ReshapeAndCache are of these kernels
    ms.set_context(mode=ms.PYNATIVE_MODE if pynative else ms.GRAPH_MODE, jit_config=jit_config)
    try:
        ms.set_device(device, device_id)
    except (RuntimeError, ValueError) as error:
        # A script that has computed with tensors of its own has chosen the device by that.
        if (ms.get_context("device_target"), ms.get_context("device_id")) != (device, device_id):
            raise EnvironmentFault(
                f"context.device_target={device}: MindSpore {ms.__version__} here has no such "
                f"device ({str(error).strip().splitlines()[0]})",
                "run on this machine's processor with context.device_target=CPU",
            ) from error
    if threads is not None:
        ms.set_context(runtime_num_threads=threads)
