"""run_mode=slora: predict with LoRA adapters, a different one for each prompt where wanted."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config import Invalid, invalid
from lite_runner.config.checks import SloraOptions as Config
from lite_runner.config.checks import completion_errors
from lite_runner.run_modes.predict import plan, run

__all__ = ["Config", "errors", "plan", "run"]


def errors(config: Config) -> Iterator[Invalid]:
    """As of predict, and there are adapters."""
    if not config.adapter_path:
        yield invalid(
            ("adapter_id", "adapter_path"), "run_mode=slora needs adapter_path=lora_adapter.json"
        )
    yield from completion_errors(config)
