"""run_mode=slora: predict with LoRA adapters, a different one for each prompt where wanted."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.fields import Fault, fault
from lite_runner.config.generate_checks import SloraOptions as Config
from lite_runner.config.generate_checks import completion_faults
from lite_runner.run_modes.predict import plan, run

__all__ = ["Config", "faults", "plan", "run"]


def faults(config: Config) -> Iterator[Fault]:
    """As of predict, and there are adapters."""
    if not config.adapter_path:
        yield fault(
            ("adapter_id", "adapter_path"), "run_mode=slora needs adapter_path=lora_adapter.json"
        )
    yield from completion_faults(config)
