"""One device for everything that a script makes, whatever device the script names."""

from __future__ import annotations

import os
import sys
from typing import Any

from lite_runner.api.context import DEVICE_VARIABLE
from lite_runner.system import environment


def force(device: str) -> None:
    """Make models, and MindSpore itself, use `device` where the script says another.

    It holds for processes that this one starts too, but for what they tell MindSpore themselves.
    Raises EnvironmentFault where MindSpore is broken.
    """
    os.environ[DEVICE_VARIABLE] = device
    environment.import_mindspore()
    mindspore: Any = sys.modules["mindspore"]
    set_context, set_device = mindspore.set_context, mindspore.set_device

    def context_of(**settings: Any) -> None:
        if "device_target" in settings:
            settings["device_target"] = device
        set_context(**settings)

    def device_of(device_target: str, device_id: int | None = None) -> None:
        set_device(device, device_id)

    mindspore.set_context = mindspore.context.set_context = context_of
    mindspore.set_device = device_of
