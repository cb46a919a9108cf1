"""MindSpore's device, and MindFormers' settings of an Ascend one, which are chosen before MindSpore
is imported and applied when the device is set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lite_runner import progress
from lite_runner.config.sections import AscendSettings
from lite_runner.errors import ConfigError, EnvironmentFault, first_line
from lite_runner.system import environment

CANN_KERNELS = "MS_DISABLE_INTERNAL_KERNELS_LIST"  # operators that use CANN's kernels
# Unless the environment sets them: MindFormers 1.3 to 2.1 leave virtual memory off, and
# vllm-mindspore leaves off LCCL, which infer_boost switches on for Atlas A2 and A3.
DEFAULTS = {"MS_ALLOC_CONF": "enable_vmm:False", "MS_ENABLE_LCCL": "off"}

_chosen = _applied = AscendSettings()


def set_device(
    device: str, device_id: int, threads: int | None = None, *, pynative: bool = False
) -> None:
    """Set MindSpore's device. Raises EnvironmentFault if there is no such device.

    `threads` None: on CPU one per processor available to this process, or the fewer that a script
    has set. `pynative`: operators run eagerly, not as a compiled graph.
    """
    import mindspore as ms

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
                f"device ({first_line(error)})",
                "run on this machine's processor with context.device_target=CPU",
            ) from error
    if device == "Ascend":
        apply_ascend_settings()
    if computes_fused(device, pynative=pynative):
        # PagedAttention and ReshapeAndCache are inference kernels of MindSpore.
        ms.set_context(jit_config=jit_config | {"infer_boost": "on"})
    if device == "CPU":
        threads = threads or min(ms.get_context("runtime_num_threads"), environment.cores())
    if threads is not None:
        ms.set_context(runtime_num_threads=threads)


def computes_fused(device: str, *, pynative: bool) -> bool:
    """True if networks use the device's fused operators: PagedAttention reads the lengths from a
    graph's input (see `decoder.Decode`), so it needs graphs."""
    return not pynative and environment.has_fused_operators(device)


def try_device(device: str) -> str:
    """Add two numbers on the first `device`; the version of the MindSpore that could.

    Raises EnvironmentFault where it cannot, or comes to another sum.
    """
    import mindspore as ms

    set_device(device, 0)
    try:
        one = ms.Tensor([1.0], ms.float32)
        total = float(ms.ops.add(one, one).asnumpy()[0])
    except (RuntimeError, ValueError, TypeError) as error:
        raise EnvironmentFault(
            f"MindSpore {ms.__version__} cannot add on {device}: {first_line(error)}"
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


def choose_device(target: str, settings: AscendSettings) -> str:
    """The kind of device, "CPU" or "Ascend", that context.device_target means on this machine. For
    Ascend, choose what the next `set_device` applies, and set DEFAULTS. Raises EnvironmentFault if
    there is no such device."""
    global _chosen
    device = environment.resolve_device(target)
    if device == "Ascend":
        _chosen = settings
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
    return device


def apply_ascend_settings() -> None:
    """Apply changed settings. Raises ConfigError for those that MindSpore rejects."""
    global _applied
    if _chosen == _applied:
        return
    import mindspore as ms

    memory, settings = _chosen.max_device_memory, dict(_chosen.ascend_config or {})
    precision = settings.pop("precision_mode", None)
    try:
        if memory is not None:
            _set_memory(memory)
        if precision is not None:
            ms.device_context.ascend.op_precision.precision_mode(precision)
        if settings:
            ms.set_context(ascend_config=settings)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"context.ascend_config: {first_line(error)}") from error
    _applied = _chosen


def _set_memory(size: str) -> None:
    import mindspore as ms

    try:
        ms.runtime.set_memory(max_size=size)
    except RuntimeError as error:
        if "repeatedly" not in str(error):
            raise
        progress.note(f"context.max_device_memory={size} has no effect: the limit was already set")


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Context in which MindSpore's own profiler records operators; its files go to a folder."""
    import mindspore

    recording = mindspore.Profiler(output_path=str(folder))
    try:
        yield
    finally:
        recording.analyse()
