"""Converting LoRA adapters between PEFT's format and MindFormers'."""

from __future__ import annotations

from pathlib import Path

from lite_runner import progress
from lite_runner.architectures.spec import Decoder
from lite_runner.config.convert_checks import ConvertOptions
from lite_runner.config.sections import AdapterFormat
from lite_runner.model.merged_adapter import adapters_of
from lite_runner.weights.lora.adapter_listing import is_listing
from lite_runner.weights.lora.adapter_write import write_adapters


def convert_adapters(
    config: ConvertOptions, model: Decoder, target: Path, form: AdapterFormat
) -> str:
    """Write the adapters, given the model's sizes; returns their source. Raises RunnerError."""
    adapters = adapters_of(config, model)
    for adapter in adapters.values():
        adapter.check_effective()
        if adapter.copies:
            names = ", ".join(adapter.copies)
            progress.note(f"adapter {adapter.name}: its copy of the base's {names} is left out")
    # A listing stays one, unless adapter_id chooses from it.
    listed = config.adapter_id is None and is_listing(Path(config.adapter_path).expanduser())
    release = config.release
    write_adapters(
        adapters, model, target, form, overwrite=config.overwrite, listed=listed, release=release
    )
    if form == "mindformers":
        names = " and ".join(f"{name}a" for name in release.adapter_names)
        progress.note(
            f"the adapters' parameters are called {names}: lora_a is for SLoRA, from MindFormers "
            "1.3 on, mindpet_delta_lora_a for its LoRA (mindformers.release= chooses)"
        )
    return config.adapter_path
