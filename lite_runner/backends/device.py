"""Sets MindSpore's device."""

from __future__ import annotations

import os

import mindspore as ms
from mindspore import Tensor, ops

from lite_runner import progress
from lite_runner.backends import ascend_context
from lite_runner.errors import EnvironmentFault
from lite_runner.system import environment

CANN_KERNELS = "MS_DISABLE_INTERNAL_KERNELS_LIST"  # operators that use CANN's kernels


def set_device(
    device: str, device_id: int, threads: int | None = None, *, pynative: bool = False
) -> None:
    """Set MindSpore's device. Raises EnvironmentFault if there is no such device.

    `threads` None: MindSpore's default. `pynative`: operators run eagerly, not as a compiled graph.
    """
    if device == "CPU":
        device_id = 0  # there is one; DEVICE_ID may belong to ranks or be left over
    jit_config = {"jit_level": "O0"}
    ms.set_context(mode=ms.PYNATIVE_MODE if pynative else ms.GRAPH_MODE, jit_config=jit_config)
    try:
        ms.set_device(device, device_id)
    except (RuntimeError, ValueError) as error:
        # A script that has already computed with tensors has set the device by that.
        if (ms.get_context("device_target"), ms.get_context("device_id")) != (device, device_id):
            raise EnvironmentFault(
                f"context.device_target={device}: MindSpore {ms.__version__} here has no such "
                f"device ({str(error).strip().splitlines()[0]})",
                "run on this machine's processor with context.device_target=CPU",
            ) from error
    if device == "Ascend":
        ascend_context.apply()
    if environment.has_fused_operators(device):
        # PagedAttention and ReshapeAndCache are inference kernels of MindSpore.
        ms.set_context(jit_config=jit_config | {"infer_boost": "on"})
    if threads is not None:
        ms.set_context(runtime_num_threads=threads)


def try_device(device: str) -> str:
    """Add two numbers on the first `device`; the version of the MindSpore that could.

    Raises EnvironmentFault where it cannot, or comes to another sum.
    """
    set_device(device, 0)
    try:
        total = float(ops.add(Tensor([1.0], ms.float32), Tensor([1.0], ms.float32)).asnumpy()[0])
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnvironmentFault(
            f"MindSpore {ms.__version__} cannot add on {device}: {reason[0]}"
        ) from error
    if total != 2:
        raise EnvironmentFault(f"MindSpore {ms.__version__} on {device}: 1 + 1 = {total}")
    return str(ms.__version__)


def choose_attention() -> None:
    """Select CANN's FlashAttentionScore kernel; call before compiling a graph with it.

    MindSpore's own kernel takes other masks, and a bias only if there are as many queries as keys.
    A user's setting is kept.
    """
    listed = os.environ.setdefault(CANN_KERNELS, "FlashAttentionScore")
    if "FlashAttentionScore" not in listed.split(","):
        progress.note(
            f"{CANN_KERNELS}={listed} is kept, so MindSpore's own FlashAttentionScore may compute"
            " prompts, whose inputs are made for CANN's -> add FlashAttentionScore to the list"
        )
