"""MindFormers' settings of an Ascend device, for this process's MindSpore.

They are chosen before MindSpore is imported, and applied when its device is set.
"""

from __future__ import annotations

import os

from lite_runner import progress
from lite_runner.config.ascend import AscendSettings
from lite_runner.errors import ConfigError

ALLOCATOR, WITHOUT_VMM = "MS_ALLOC_CONF", "enable_vmm:False"

_chosen = _applied = AscendSettings()


def choose(settings: AscendSettings, device: str, *, tell: bool = True) -> None:
    """Choose the settings that the next `apply` sets; on another device a note (unless `tell` is
    false) says that they have no effect.

    As in MindFormers 1.3 to 2.1, MindSpore's allocator does not use virtual memory unless the
    environment enables it.
    """
    global _chosen
    if device == "Ascend":
        _chosen = settings
        os.environ.setdefault(ALLOCATOR, WITHOUT_VMM)
    elif tell and settings.asked():
        progress.note(f"context ({', '.join(settings.asked())}): for Ascend; this runs on {device}")


def apply() -> None:
    """Apply changed settings. Raises ConfigError for what MindSpore rejects."""
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
        raise ConfigError(f"context.ascend_config: {str(error).strip().splitlines()[0]}") from error
    _applied = _chosen


def _set_memory(size: str) -> None:
    import mindspore as ms

    try:
        ms.runtime.set_memory(max_size=size)
    except RuntimeError as error:
        if "repeatedly" not in str(error):
            raise
        progress.note(f"context.max_device_memory={size} comes too late: it is set already")
