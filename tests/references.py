"""Names of the tiny models of tests/fixtures/reference: every way to run is held to all of them, or
to some that have all there is between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, unsupported
from lite_runner.architectures.spec import Decoder, RopeScaling
from tests.models import reference_model
from tests.paths import REFERENCE

# Fields that no layer computes with.
_NAMES = {"architecture", "eos_token_id", "bos_token_id", "pad_token_id"}

# What a step computes otherwise than a whole prompt: where its tokens are, and what they see.
POSITIONS = (
    *("learned_positions", "position_offset", "prefix", "blocks.attention.alibi"),
    *("blocks.attention.latent.rank", "blocks.attention.rotary", "blocks.attention.sinks"),
    "blocks.attention.window",
)


def every() -> list[str]:
    return sorted(path.parent.name for path in REFERENCE.glob("*/model.safetensors"))


def with_projections(found: Mapping[str, NDArray[Any]], model: Decoder) -> dict[str, NDArray[Any]]:
    """Tensors of a Hugging Face folder, projections multiplied into embedding and head."""
    tensors = dict(found)
    beside = architecture_of(model).projections or ()
    if beside and beside[0] in tensors:
        inward, outward = map(tensors.pop, beside)
        words = tensors["model.decoder.embed_tokens.weight"]
        tensors["lm_head.weight"] = words @ outward
        tensors["model.decoder.embed_tokens.weight"] = words @ inward.T
    return tensors


def of_graphs() -> list[str]:
    """Those that MindSpore's graphs compute."""
    return [case for case in every() if not unsupported(reference_model(case))]


def covering(cases: Sequence[str], *parts: str) -> list[str]:
    """As few of them as have all that a graph is compiled of: each flag and name of spec.py, and
    each number besides 0 and 1; with `parts`, such as POSITIONS, of these fields alone. A scaling
    of RoPE is a table before it comes to a graph, whatever its kind and numbers, unless it depends
    on the length of the text; what the tables hold is tested with NumPy, for all models."""
    kinds = {case: set(_kinds(reference_model(case))) for case in cases}
    if parts:
        kinds = {
            case: {kind for kind in found if ".".join(map(str, kind)).startswith(parts)}
            for case, found in kinds.items()
        }
    left, chosen = set().union(*kinds.values()), []
    while left:
        chosen.append(max(cases, key=lambda case: len(kinds[case] & left)))
        left -= kinds[chosen[-1]]
    return chosen


def _kinds(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[object, ...]]:
    if isinstance(value, RopeScaling):
        yield *path, value.type if value.type in ("dynamic", "longrope") else None
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _NAMES:
                yield from _kinds(getattr(value, field.name), (*path, field.name))
    elif isinstance(value, tuple):
        for one in value:
            yield from _kinds(one, path)
    else:
        plain = isinstance(value, bool | str | None) or value in (0, 1)
        yield *path, value if plain else "another number"
