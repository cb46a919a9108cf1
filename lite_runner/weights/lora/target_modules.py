"""LoRA target modules: every linear layer, the word embedding and the head, with their names in
PEFT and MindFormers.

Some fuse q, k and v, as Hugging Face does of gpt2 and bloom; an adapter of that module becomes
three of ours, which share A.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from lite_runner.architectures import Parameter, parameters
from lite_runner.architectures.naming import HEAD as HEAD
from lite_runner.architectures.spec import Decoder
from lite_runner.records import dataclass


@dataclass(frozen=True)
class TargetModule:
    """A canonical weight that A [r, width_in] and B [width_out, r] target."""

    weight: str  # canonical name
    width_in: int  # of an embedding: the vocabulary
    width_out: int
    mindformers: str  # name of the module
    hugging_face: str
    fused: Parameter | None = None  # whose rows are elsewhere in what the module stores
    is_embedding: bool = False
    transposed: bool = False  # the weight is [in, out], else [out, in]


def sites(config: Decoder) -> tuple[TargetModule, ...]:
    """Every target module in layer order, a tied head included."""
    found = []
    table = parameters(config)
    for parameter in table:
        is_embedding = parameter is table[0]
        is_head = parameter.role == "head"
        if parameter.layout == "plain" and not is_embedding and not is_head:
            continue
        transposed = is_embedding or parameter.layout == "in_out"
        width_in, width_out = parameter.shape if transposed else parameter.shape[::-1]
        found.append(
            TargetModule(
                parameter.name,
                width_in,
                width_out,
                (parameter.stored or parameter.name).rpartition(".")[0],
                parameter.hugging_face.rpartition(".")[0],
                parameter,
                is_embedding,
                transposed,
            )
        )
    if config.tie_word_embeddings:
        found.append(
            TargetModule(f"{HEAD}.weight", config.hidden_size, config.vocab_size, HEAD, HEAD),
        )
    return tuple(found)


def by_module(config: Decoder, *, hugging_face: bool) -> dict[str, list[TargetModule]]:
    """Module name -> its weights: one, or the three that are fused."""
    found: defaultdict[str, list[TargetModule]] = defaultdict(list)
    for site in sites(config):
        if hugging_face:
            found[site.hugging_face].append(site)
        elif site.fused is None or site.fused.stored:
            found[site.mindformers].append(site)
        else:
            found[site.mindformers].append(replace(site, fused=None))
    return dict(found)
