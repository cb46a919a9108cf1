"""Model architectures, one file each; everything else is derived from them. NumPy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union

from lite_runner.architectures.architecture import GGUF as GGUF
from lite_runner.architectures.architecture import Architecture as Architecture
from lite_runner.architectures.architecture import CustomNetwork as CustomNetwork
from lite_runner.architectures.architecture import MindFormers
from lite_runner.architectures.baichuan import BAICHUAN
from lite_runner.architectures.bloom import BLOOM
from lite_runner.architectures.chatglm import CHATGLM
from lite_runner.architectures.chatglm_6b import CHATGLM_6B
from lite_runner.architectures.cohere import COHERE, COHERE2
from lite_runner.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from lite_runner.architectures.ernie4_5 import ERNIE4_5
from lite_runner.architectures.exaone4 import EXAONE4
from lite_runner.architectures.falcon import FALCON
from lite_runner.architectures.gemma import GEMMA
from lite_runner.architectures.gemma2 import GEMMA2
from lite_runner.architectures.gemma3 import GEMMA3, GEMMA3_TEXT
from lite_runner.architectures.glm import GLM, GLM4
from lite_runner.architectures.glm4_moe import GLM4_MOE
from lite_runner.architectures.gpt2 import GPT2
from lite_runner.architectures.gpt_neox import GPT_NEOX
from lite_runner.architectures.gpt_oss import GPT_OSS
from lite_runner.architectures.granite import GRANITE
from lite_runner.architectures.granite_hybrid import GRANITE_HYBRID
from lite_runner.architectures.granite_moe import GRANITE_MOE
from lite_runner.architectures.hunyuan import HUNYUAN, HUNYUAN_MOE
from lite_runner.architectures.internlm import INTERNLM, INTERNLM2
from lite_runner.architectures.llama import LLAMA
from lite_runner.architectures.minicpm import MINICPM
from lite_runner.architectures.mistral import MISTRAL
from lite_runner.architectures.mixtral import MIXTRAL
from lite_runner.architectures.mpt import MPT
from lite_runner.architectures.naming import Parameter as Parameter
from lite_runner.architectures.naming import Part, Role, Rows, parameters_of
from lite_runner.architectures.nemotron import NEMOTRON
from lite_runner.architectures.olmo2 import OLMO2
from lite_runner.architectures.olmo3 import OLMO3
from lite_runner.architectures.olmoe import OLMOE
from lite_runner.architectures.opt import OPT
from lite_runner.architectures.phi import PHI
from lite_runner.architectures.phi3 import PHI3
from lite_runner.architectures.qwen import QWEN
from lite_runner.architectures.qwen2 import QWEN2, QWEN2_5_VL, QWEN2_VL
from lite_runner.architectures.qwen2_moe import QWEN2_MOE
from lite_runner.architectures.qwen3 import QWEN3, QWEN3_VL
from lite_runner.architectures.qwen3_5 import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
)
from lite_runner.architectures.qwen3_moe import QWEN3_MOE
from lite_runner.architectures.qwen3_next import QWEN3_NEXT
from lite_runner.architectures.seed_oss import SEED_OSS
from lite_runner.architectures.settings import AutoSettings, DecoderSettings, token_ids
from lite_runner.architectures.smollm3 import SMOLLM3
from lite_runner.architectures.spec import Decoder
from lite_runner.architectures.stablelm import STABLELM
from lite_runner.architectures.starcoder2 import STARCODER2
from lite_runner.architectures.telechat import TELECHAT, TELECHAT3

# In this order messages list them.
_BUILT_IN: tuple[Architecture, ...] = (
    *(BLOOM, LLAMA, QWEN2, GPT2, QWEN3, MISTRAL, OLMO2, GRANITE, SMOLLM3),
    *(CHATGLM_6B, CHATGLM, GLM, GLM4, GEMMA2, GEMMA3_TEXT, GEMMA3, QWEN3_MOE, MIXTRAL, PHI3),
    *(STARCODER2, GPT_NEOX),
    *(QWEN2_MOE, GLM4_MOE, GPT_OSS, OLMOE, GRANITE_MOE, PHI, STABLELM, COHERE, COHERE2, GEMMA),
    *(OLMO3, EXAONE4, SEED_OSS, ERNIE4_5, HUNYUAN, NEMOTRON, OPT),
    *(DEEPSEEK_V2, DEEPSEEK_V3, QWEN2_VL, QWEN2_5_VL, QWEN3_VL),
    *(BAICHUAN, FALCON, HUNYUAN_MOE, INTERNLM, INTERNLM2, MINICPM, MPT, QWEN),
    *(QWEN3_NEXT, GRANITE_HYBRID, QWEN3_5_TEXT, QWEN3_5, QWEN3_5_MOE_TEXT, QWEN3_5_MOE),
    *(TELECHAT, TELECHAT3),
)
# By model_type; lite_runner.register adds to it.
KNOWN: dict[str, Architecture] = {one.name: one for one in _BUILT_IN}


def architecture_of(model: Decoder) -> Architecture:
    """The architecture of a model."""
    return KNOWN[model.architecture]


def named_in(raw: Mapping[str, Any]) -> Architecture | None:
    """The architecture of a config.json; None: it is unknown."""
    name = raw.get("model_type")
    # ChatGLM-6B has the model_type of its successors, of which none has these fields.
    if name == "chatglm" and ("inner_hidden_size" in raw or "position_encoding_2d" in raw):
        name = "chatglm_6b"
    return KNOWN.get(name) if isinstance(name, str) else None


# Several architectures may share a config class: the first one's reader tells them apart.
_MINDFORMERS: dict[str, MindFormers] = {
    one.mindformers.config: one.mindformers for one in reversed(_BUILT_IN) if one.mindformers
}
# The models of conf/ to start from, by MindFormers' network, for a model of another name.
NETWORKS = {one.network: one.model for one in _MINDFORMERS.values()}

if TYPE_CHECKING:
    Network: TypeAlias = str
    ModelSettings: TypeAlias = DecoderSettings | AutoSettings
else:
    Network = Literal.__getitem__((*NETWORKS, "auto"))
    ModelSettings = Union.__getitem__(
        (*(one.section for one in _MINDFORMERS.values()), AutoSettings)
    )


def of_mindformers(config: object) -> MindFormers | None:
    """The architecture with this config class of MindFormers; None: there is none."""
    return _MINDFORMERS.get(config) if isinstance(config, str) else None


def of_yaml(raw: Mapping[str, Any], network: Any) -> MindFormers | None:
    """The architecture of a yaml of MindFormers that names a `network`; None: it is unknown."""
    for one in _MINDFORMERS.values():
        if one.claims(raw):
            return one
    named = (one for one in _MINDFORMERS.values() if network in (one.network, *one.also))
    return next(named, None)


def model_of(settings: ModelSettings) -> Decoder | None:
    """The model that settings describe; None for model=auto, whose checkpoint has the sizes."""
    if isinstance(settings, AutoSettings):
        return None
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    ids = token_ids(settings.eos_token_id)
    return _MINDFORMERS[settings.type].read(given | {"eos_token_id": ids})


def custom_network(model: Decoder) -> CustomNetwork | None:
    """The user's registered network; None: the network is built from the description."""
    return architecture_of(model).custom


def network_code(model: Decoder) -> str | None:
    """Cache key of a custom network: see CustomNetwork.code."""
    custom = custom_network(model)
    return None if custom is None else custom.code


def can_untie_head(model: Decoder) -> bool:
    """True where the architecture supports an untied output head."""
    architecture = architecture_of(model)
    return architecture.custom is None and not architecture.always_tied


def stored_rows(parameter: Parameter, model: Decoder) -> Rows | None:
    """Its rows in the tensor that checkpoints store; None: it is stored as it is."""
    return architecture_of(model).stored_rows(parameter, model)


def parameters(model: Decoder) -> tuple[Parameter, ...]:
    """Every tensor of the model, in layer order."""
    return _parameters(architecture_of(model), model)


@lru_cache(maxsize=16)
def _parameters(architecture: Architecture, model: Decoder) -> tuple[Parameter, ...]:
    custom = architecture.custom
    if custom is None:
        return tuple(parameters_of(model, {**architecture.names, **architecture.renamed(model)}))
    head = [one for one in parameters_of(model, {}) if one.role == "head"]
    return (*custom.tensors(model), *head)


ParameterKey: TypeAlias = tuple[Role | None, int | None, Part]  # role, layer, weight or bias


def by_role(model: Decoder) -> dict[ParameterKey, Parameter]:
    """Every tensor of a described model but its experts' by role, layer and kind."""
    table = parameters(model)
    return {(one.role, one.layer, one.kind): one for one in table if one.expert is None}


def by_expert(
    model: Decoder, kind: Part = "weight"
) -> dict[tuple[Role | None, int | None], list[Parameter]]:
    """The experts' matrices of each role and layer, or biases, in the order of the experts."""
    found: dict[tuple[Role | None, int | None], list[Parameter]] = {}
    for one in parameters(model):
        if one.expert is not None and one.kind == kind:
            found.setdefault((one.role, one.layer), []).append(one)
    return found
