"""PanGu-alpha: a GPT-2 whose last layer, behind the final norm, has queries made of a table of
positions. MindFormers alone has its code, whose names config.json has here, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lite_runner.architectures import (
    Architecture,
    MindFormers,
    gpt2,
    shared_fields,
    shared_names,
    shared_settings,
)
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Name, Names
from lite_runner.architectures.settings import DecoderSettings, Error, error
from lite_runner.architectures.spec import Decoder
from lite_runner.records import Count, dataclass

_OURS, _LAYER = "backbone.blocks.{}", "transformer.h.{}"


def _name(ours: str, last: str, **others: Any) -> Name:
    return Name(ours, ours.replace(_OURS, _LAYER), last=last, **others)


NAMES: Names = {
    "embedding": gpt2.NAMES["embedding"],
    "positions": gpt2.NAMES["positions"],
    "query_places": _name(f"{_OURS}.places.", "backbone.top_query_embedding.embedding_table."),
    **{
        role: _name(
            name.mindformers,
            name.mindformers.replace(_OURS, "backbone.top_query_layer"),
            transposed=name.transposed,
        )
        for role, name in gpt2.NAMES.items()
        if _OURS in name.mindformers
    },
    "out_norm": _name(f"{_OURS}.out_norm", "", stored="backbone.layernorm"),
}


@dataclass(frozen=True, kw_only=True)
class PanguAlphaSettings(DecoderSettings):
    """Settings of PanGu-alpha."""

    type: Literal["PanguAlphaConfig"] = "PanguAlphaConfig"
    ffn_hidden_size: Count
    hidden_act: Literal["gelu", "fast_gelu", "gelu_exact", "relu"]  # gelu: the tanh form

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        if self.num_layers < 2:
            yield error("num_layers: got 1, expected 2 or more: the last is another", "num_layers")


def from_settings(given: Mapping[str, Any]) -> Decoder:
    """From the settings of MindFormers' class."""
    model = gpt2.decoder(
        architecture="pangualpha",
        **shared_settings(given),
        head_dim=given["hidden_size"] // given["num_heads"],
        intermediate_size=given["ffn_hidden_size"],
        norm_eps=1e-5,
        activation=gpt2.OF_SETTINGS.get(given["hidden_act"]),
    )
    *first, before, last = model.blocks
    before = dataclasses.replace(before, out_norm=model.norm)
    last = dataclasses.replace(
        last, attention=dataclasses.replace(last.attention, placed_query=True)
    )
    return dataclasses.replace(model, blocks=(*first, before, last), norm=None)


def settings(model: Decoder) -> dict[str, Any]:
    """The inverse of `from_settings`, besides the shared ones."""
    return {
        "ffn_hidden_size": model.intermediate_size,
        "hidden_act": "fast_gelu" if gpt2.quick(model) else model.feed_forward.function,
    }


def read(fields: Fields) -> Decoder:
    fields.neutral(post_layernorm_residual=False, use_moe=False)
    fields = fields.with_defaults(hidden_act="fast_gelu")
    fields.choice("hidden_act", ("gelu", *gpt2.OF_SETTINGS))
    given = shared_fields(fields)
    if given["num_layers"] < 2:
        raise fields.invalid("num_layers", 1, "2 or more: the last is another")
    width = fields.integer("ffn_hidden_size")
    return from_settings(given | {"ffn_hidden_size": width, "hidden_act": fields.raw["hidden_act"]})


PANGUALPHA = Architecture(
    "pangualpha",
    read,
    NAMES,
    lambda model: shared_names(model) | settings(model),
    MindFormers(
        PanguAlphaSettings,
        "PanguAlphaHeadModel",
        "common",
        settings,
        from_settings,
        sizes={"ffn_hidden_size": "intermediate_size"},
        model="pangualpha_2_6b",
        also=("PanguAlphaPromptTextClassificationModel",),
        unread=frozenset(("eod_token_id", "expert_num", "per_token_num_experts_chosen")),
    ),
    always_tied=True,
    spelling="words",
)
