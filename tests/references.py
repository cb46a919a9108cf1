"""Names of the tiny models of tests/fixtures/reference: every way to run is held to all of them, or
to some that have all there is between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from numpy.typing import NDArray

from lite_runner.architectures import architecture_of, unsupported
from lite_runner.architectures.spec import Decoder, RopeScaling
from tests.models import reference_model
from tests.paths import REFERENCE

# Fields that no layer computes with: names, and the order of a file's rows.
_NAMES = {"architecture", "eos_token_id", "bos_token_id", "pad_token_id", "interleaved"}

# What a step computes otherwise than a whole prompt: where its tokens are, and what they see.
INPUTS = (  # those of the graphs
    *("learned_positions", "position_offset", "prefix", "blocks.attention.alibi"),
    *("blocks.attention.rotary", "blocks.attention.window"),
)
POSITIONS = (*INPUTS, "blocks.attention.latent.rank", "blocks.attention.sinks")


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


def blends() -> dict[str, Decoder]:
    """Models that nobody has, of what else a case each would be compiled for: so few graphs hold
    it. The native kernels, which transformers holds to all of it, say what they compute.

    | blend | of |
    |---|---|
    | sparse, block 1 | clipped keys, norms over all heads together, experts with ReLU and |
    | | scaled inputs, a gate of the shared network, scaled residuals |
    | sparse, block 2 | scores capped, norms behind RoPE, squared ReLU, a normed residual |
    | alibi | its scale, a norm of the embedding |
    """
    sparse, alibi = reference_model("qwen2_moe"), reference_model("bloom_normed")
    norm, (one, two) = sparse.norm, sparse.blocks
    assert one.feed_forward.experts is not None
    relu = replace(
        one.feed_forward,
        activation="relu",
        experts=replace(one.feed_forward.experts, scaled_inputs=True),
    )
    blocks = (
        replace(
            one,
            attention=replace(one.attention, clip=1.5, qk_norm=norm, qk_norm_by_head=False),
            feed_forward=relu,
            residual_scale=0.5,
        ),
        replace(
            two,
            attention=replace(two.attention, softcap=3.0, qk_norm=norm, qk_norm_late=True),
            feed_forward=reference_model("nemotron").blocks[0].feed_forward,
            normed_residual=1.0,
        ),
    )
    scaled = (
        replace(block, attention=replace(block.attention, alibi_scale=0.5))
        for block in alibi.blocks[:2]
    )
    return {
        "sparse": replace(
            sparse,
            architecture="qwen3_next",  # which has a name for each of the tensors
            blocks=blocks,
            head_bias=True,
        ),
        "alibi": replace(alibi, blocks=tuple(scaled)),
    }


def covering(cases: Sequence[str], *parts: str, beside: Iterable[Decoder] = ()) -> list[str]:
    """As few of them as have all that a graph is compiled of and that the models `beside` have not:
    each flag and name of spec.py, and each number besides 0 and 1; with `parts`, such as POSITIONS,
    of these fields alone. A scaling of RoPE is a table before it comes to a graph, whatever its
    kind and numbers, unless it depends on the length of the text; what the tables hold is tested
    with NumPy, for all models."""
    others = set[_Kind]().union(*(_kinds_of(model) for model in beside))
    kinds = {case: _kinds_of(reference_model(case)) - others for case in cases}
    if parts:
        kinds = {
            case: frozenset(kind for kind in found if ".".join(map(str, kind)).startswith(parts))
            for case, found in kinds.items()
        }
    left, chosen = set().union(*kinds.values()), []
    while left:
        chosen.append(max(cases, key=lambda case: len(kinds[case] & left)))
        left -= kinds[chosen[-1]]
    return chosen


_Kind = tuple[object, ...]


@cache
def _kinds_of(model: Decoder) -> frozenset[_Kind]:
    return frozenset(_kinds(replace(model, blocks=tuple(dict.fromkeys(model.blocks)))))


def _kinds(value: object, path: tuple[str, ...] = ()) -> Iterator[_Kind]:
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
