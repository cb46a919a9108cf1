"""Models of other sizes, for tests."""

from __future__ import annotations

import inspect
from typing import Any

from lite_runner.architectures.flat import ModelConfig
from lite_runner.architectures.spec import Decoder


def resized(model: Decoder, **changes: Any) -> Decoder:
    """`model` with other sizes, by the names that ModelConfig has for them."""
    sizes = model.sizes()
    flat = {name: sizes[name] for name in inspect.signature(ModelConfig).parameters}
    if sizes["qkv_has_bias"] and sizes["theta"]:
        flat["family"] = "llama" if model.rotary is not None else flat["family"]
    return ModelConfig(**flat | changes)
