"""RoPE parameters in a Hugging Face config.json: base and scaling."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures.fields import Fields
from lite_runner.architectures.spec import RopeScaling

ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")


def rope_from_hf(
    fields: Fields, positions: int, dims: int, rope: Fields | None = None, *, partial: bool = False
) -> tuple[float, RopeScaling | None]:
    """Base (theta) and scaling of a model with `positions` position ids, of whose heads `dims`
    dimensions are rotated; `rope`: the object of rotary parameters, if it is not where most files
    have it.

    `partial`: heads may be rotated in part, see `rotary_dims`. Raises ArtifactError for an
    unsupported scaling.
    """
    rope = rope or _rope_object(fields)
    factor = _partial_factor(rope, fields)
    if factor not in (None, 1) and not partial:
        raise rope.fault("partial_rotary_factor", factor, "1: the whole head is rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    scaling = _rope_scaling(rope, fields, positions, dims)
    if partial and scaling is not None and scaling.type == "dynamic":
        raise rope.fault("rope_type", "dynamic", "another: heads are rotated in part")
    return theta, scaling


def rotary_dims(fields: Fields, head_dim: int, default: float) -> int:
    """How many dimensions of a head are rotated; `default` is that of partial_rotary_factor."""
    rope = _rope_object(fields)
    factor = _partial_factor(rope, fields)
    factor = default if factor is None else factor
    if type(factor) in (int, float) and 0 < factor <= 1:
        dims = int(head_dim * factor)
        if dims and dims % 2 == 0:
            return dims
    expected = f"a fraction of the {head_dim} of a head that is an even number"
    raise rope.fault("partial_rotary_factor", factor, expected)


def _partial_factor(rope: Fields, fields: Fields) -> Any:
    return rope.raw.get("partial_rotary_factor", fields.raw.get("partial_rotary_factor"))


def _rope_object(fields: Fields) -> Fields:
    """The object of rotary parameters: `rope_parameters` of transformers 5 or `rope_scaling`."""
    # transformers 5 also lets a legacy rope_scaling take precedence.
    old, new = fields.raw.get("rope_scaling"), fields.raw.get("rope_parameters")
    key, value = ("rope_scaling", old) if old else ("rope_parameters", new)
    rope = fields.section(key)
    nested = [name for name, item in (value or {}).items() if isinstance(item, dict)]
    if nested:
        raise fields.fault(key, nested, "one set of parameters, the same for all layers")
    return rope


def _rope_scaling(rope: Fields, fields: Fields, positions: int, dims: int) -> RopeScaling | None:
    key, kind = rope.get("rope_type", "type")
    if kind in (None, "default"):
        return None
    if kind not in ROPE_TYPES:
        raise rope.fault(key, kind, f"default, {', '.join(ROPE_TYPES)}")
    original = positions
    if kind in ("llama3", "yarn", "longrope"):
        outer = fields.integer("original_max_position_embeddings", default=positions)
        inner = rope.integer("original_max_position_embeddings", default=positions)
        # The top-level value takes precedence over the nested one, as in transformers.
        original = inner if fields.raw.get("original_max_position_embeddings") is None else outer
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise rope.fault("high_freq_factor", high, f"more than low_freq_factor = {low}")
        return RopeScaling(
            "llama3", _factor(rope), original, low_freq_factor=low, high_freq_factor=high
        )
    if kind in ("yarn", "longrope"):
        given = rope.raw.get("factor") is not None
        factor = _factor(rope) if given else positions / original
    if kind == "longrope":
        return RopeScaling(
            "longrope",
            factor,
            original,
            attention_factor=rope.optional_number("attention_factor"),
            short_factor=rope.numbers("short_factor", dims // 2),
            long_factor=rope.numbers("long_factor", dims // 2),
        )
    if kind == "yarn":
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            attention_factor=rope.optional_number("attention_factor"),
            mscale=rope.optional_number("mscale"),
            mscale_all_dim=rope.optional_number("mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    return RopeScaling(kind, _factor(rope), original)


def _factor(rope: Fields) -> float:
    factor = rope.number("factor")
    if not 1 <= factor <= 1024:
        raise rope.fault("factor", factor, "a number from 1 to 1024")
    return factor


def rope_scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    """The `rope_scaling` object that `rope_from_hf` reads as `scaling`."""
    raw: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type in ("llama3", "yarn", "longrope"):
        raw["original_max_position_embeddings"] = scaling.original_seq_length
    if scaling.type == "llama3":
        raw |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.type == "yarn":
        raw |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if scaling.type == "longrope":
        raw |= {
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    if scaling.type in ("yarn", "longrope"):
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        raw |= {
            name: getattr(scaling, name) for name in optional if getattr(scaling, name) is not None
        }
    return raw
