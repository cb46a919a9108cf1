"""Sliding windows per layer, as Qwen's config.json and MindFormers settings describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import Decoder

FULL, SLIDING = "full_attention", "sliding_attention"


def read(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, from config.json."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    slides, given = fields.flag("use_sliding_window", False), fields.raw["sliding_window"]
    window = fields.integer("sliding_window") if slides and given is not None else None
    first, kinds = fields.raw["max_window_layers"], fields.raw.get("layer_types")
    if kinds is None:
        if window is not None and (type(first) is not int or first < 0):
            raise fields.fault("max_window_layers", first, "an integer from 0")
        return per_layer(window, layers, first if window else 0, None)
    expected = f"a list of {layers}, each {FULL}" + (f" or {SLIDING}" if window else ": no window")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fault("layer_types", kinds, expected)
    for kind in kinds:
        if kind != FULL and (kind != SLIDING or window is None):
            raise fields.fault("layer_types", kind, expected)
    return per_layer(window, layers, 0, kinds)


def periodic(layers: int, period: int) -> list[str]:
    """Kinds of layers of which every `period`th has no window."""
    return [SLIDING if (layer + 1) % period else FULL for layer in range(layers)]


def per_layer(
    window: int | None, layers: int, first: int, kinds: Sequence[str] | None
) -> tuple[int | None, ...]:
    """Sliding window per layer: for layers from `first` on, or by their `kinds`."""
    slides = [layer >= first for layer in range(layers)]
    if kinds is not None:
        slides = [kind == SLIDING for kind in kinds]
    return tuple(window if here else None for here in slides)


def from_settings(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Sliding window per layer, from MindFormers settings."""
    window = given["sliding_window"] if given["use_sliding_window"] else None
    kinds, period = given["layer_types"], given["sliding_window_pattern"]
    if kinds is None and period is not None:
        kinds = periodic(given["num_layers"], period)
    return per_layer(window, given["num_layers"], given["max_window_layers"], kinds)


def to_settings(model: Decoder) -> dict[str, Any]:
    """The settings that `read` and `from_settings` turn into the windows of `model`."""
    slides = [window is not None for window in model.windows]
    if not any(slides):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": max(window or 0 for window in model.windows),
        "max_window_layers": slides.index(True),
        "layer_types": [SLIDING if here else FULL for here in slides],
    }
