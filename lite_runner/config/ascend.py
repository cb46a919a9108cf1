"""The settings of an Ascend card in the section `context`, named as MindFormers names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lite_runner.config.fields import Fault, fault
from lite_runner.config.schema import RunConfig
from lite_runner.config.sections import Context
from lite_runner.config.sizes import size_faults
from lite_runner.config.suggest import did_you_mean, nearest
from lite_runner.records import dataclass

KEYS = ("max_device_memory", "ascend_config")
# What mindspore.set_context(ascend_config=) takes in 2.10, but for what only training has.
ASCEND_CONFIG = (
    *("precision_mode", "jit_compile", "atomic_clean_policy", "matmul_allow_hf32"),
    *("conv_allow_hf32", "op_precision_mode", "op_debug_option", "ge_options"),
    *("parallel_speed_up_json_path", "host_scheduling_max_threshold", "hccl_watchdog"),
    "topo_order",
)


@dataclass(frozen=True)
class AscendSettings:
    """Those of KEYS; None: not set."""

    max_device_memory: str | None = None
    ascend_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, context: Context) -> AscendSettings:
        """Those of a config; texts of a command line become what they say."""
        settings = context.ascend_config
        if settings is not None:
            settings = {name: _typed(value) for name, value in settings.items()}
        return cls(context.max_device_memory, settings)

    def asked(self) -> list[str]:
        """The keys that are set."""
        return [key for key in KEYS if getattr(self, key)]


def _typed(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def ascend_faults(config: RunConfig) -> Iterator[Fault]:
    """Settings that MindSpore would refuse on an Ascend device."""
    yield from size_faults("context.max_device_memory", config.context.max_device_memory)
    for name in config.context.ascend_config or ():
        if name not in ASCEND_CONFIG:
            key, near = f"context.ascend_config.{name}", did_you_mean(nearest(name, ASCEND_CONFIG))
            yield fault(key, f"{key}: MindSpore has no such setting of Ascend{near}")
