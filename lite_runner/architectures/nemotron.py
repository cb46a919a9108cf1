"""Nemotron: LayerNorm with weights less 1, squared ReLU without a gate, and rotary positions on a
part of each head."""

from __future__ import annotations

from typing import Any

from lite_runner.architectures import GGUF, Architecture, apart, llama_like, row_order
from lite_runner.architectures.fields import Fields
from lite_runner.architectures.naming import Names
from lite_runner.architectures.spec import Decoder, Norm

NAMES: Names = {role: name for role, name in llama_like.NAMES.items() if role != "gate"}


def read(fields: Fields) -> Decoder:
    fields = fields.with_defaults(hidden_act="relu2")
    epsilon = fields.number("norm_eps", 1e-5)
    same = fields.with_values(rms_norm_eps=epsilon)
    model = llama_like.decoder(
        architecture="nemotron",
        **llama_like.read_biases(fields),
        **llama_like.sizes(same, positions=4096, partial=0.5),
    )
    norm = Norm("layer", epsilon)
    return llama_like.changed(model, feed_forward={"gated": False}, norm=norm)


def write(model: Decoder) -> dict[str, Any]:
    found = llama_like.shared(model)
    del found["rms_norm_eps"]
    return found | {
        "architectures": ["NemotronForCausalLM"],
        **llama_like.biases(model),
        "norm_eps": model.norm_eps,
        "partial_rotary_factor": llama_like.rotated_share(model),
    }


NEMOTRON = Architecture(
    "nemotron",
    read,
    NAMES,
    write,
    gguf=GGUF(
        llama_like.layer_norm_keys("norm_eps") | llama_like.PARTIAL_KEYS,
        flags=llama_like.BIAS_FLAGS,
        infer=llama_like.infer_rotated_share,
        rows=row_order.rotated_first(apart),
    ),
    norms_less_one=True,
    stored_rows=row_order.rotated_first(apart),
)
