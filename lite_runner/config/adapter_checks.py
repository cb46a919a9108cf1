"""Validation errors of LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from lite_runner.config.fields import Fault, fault, show
from lite_runner.config.options import AdapterOptions
from lite_runner.config.requests import adapter_names


def adapter_faults(config: AdapterOptions, *, one: bool) -> Iterator[Fault]:
    """Where adapters are, and which; with `one` a run mode takes a single one, for all."""
    for key in ("adapter_id", "adapter_root", "max_loaded_adapters", "adapter_dtype"):
        if getattr(config, key, None) in (None, "", "auto"):
            continue
        if key == "adapter_id" and not adapter_names(config.adapter_id):
            continue  # the base model, which every run has
        if not config.adapter_path:
            yield fault((key, "adapter_path"), f"{key} needs adapter_path=lora_adapter.json")
    if config.merges_adapter and not config.adapter_path and config.checkpoint_source == "random":
        key = "model.model_config.pet_config"
        yield fault(
            (key, "load_checkpoint"), f"{key}.pet_type=lora: random weights have no LoRA weights"
        )
    ids = config.adapter_id
    nameless = ids is not None and (isinstance(ids, tuple) or not adapter_names(ids))
    if one and nameless:
        got = show(config.adapter_id)
        yield fault("adapter_id", f"adapter_id: got {got}, expected the name of one adapter")
