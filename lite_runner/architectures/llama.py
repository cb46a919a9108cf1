"""Llama 1 to 3 and SmolLM2; what models built like it share: MindFormers' LlamaConfig, read and
written, and sliding windows under Hugging Face's keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Literal

from lite_runner.architectures import GGUF, Architecture, MindFormers, llama_like, shared_settings
from lite_runner.architectures.fields import KERNEL, Fields
from lite_runner.architectures.settings import (
    PREFIX,
    Error,
    RotarySettings,
    Translation,
    error,
    network_of,
)
from lite_runner.architectures.spec import Decoder, Rotary
from lite_runner.errors import show
from lite_runner.records import Count, Index, Positive, dataclass


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LlamaLikeSettings(RotarySettings):
    """Settings of models built like a Llama, with experts or without."""

    rms_norm_eps: Positive
    use_sliding_window: bool = False  # else sliding_window and the next three have no effect
    max_window_layers: Index = 0  # first layers, which have no window
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window_pattern: Count | None = None  # every Nth layer has no window
    no_rope_layers: tuple[Literal[0, 1], ...] | None = None  # 1: with rotary positions; null: all
    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive | None = None  # of scores; null: head_dim^-1/2
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0  # logits are divided by it
    attn_logit_softcapping: Positive | None = None  # of scores, with tanh; null: none
    final_logit_softcapping: Positive | None = None  # of logits
    rope_local_base_freq: Positive | None = None  # theta of layers with windows; null: 10000

    def errors(self) -> Iterator[Error]:
        yield from super().errors()
        for name in ("layer_types", "no_rope_layers"):
            listed = getattr(self, name)
            if listed is not None and len(listed) != self.num_layers:
                yield error(
                    f"{name}: got {len(listed)} layers, expected num_layers={self.num_layers}",
                    *(name, "num_layers"),
                )
        if self.use_sliding_window and self.sliding_window is None:
            yield error(
                "sliding_window: got null, expected a number of tokens with"
                f" {PREFIX}use_sliding_window=true",
                *("use_sliding_window", "sliding_window"),
            )


def settings(model: Decoder) -> dict[str, Any]:
    """Settings besides the shared ones."""
    rotary = model.rotary or Rotary()
    return {
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "rms_norm_eps": model.norm_eps,
        "theta": rotary.theta,
        "rope_scaling": None if rotary.scaling is None else dataclasses.asdict(rotary.scaling),
        **({} if rotary.dims is None else {"partial_rotary_factor": rotary.dims / model.head_dim}),
        "qkv_has_bias": model.attention.qkv_bias,
        "attn_proj_has_bias": model.attention.out_bias,
        "mlp_bias": model.feed_forward.bias,
        **windows_to_settings(model),
        **(multipliers(model) if multipliers(model) != _NO_MULTIPLIERS else {}),
        **({} if all(no_rope_layers(model)) else {"no_rope_layers": no_rope_layers(model)}),
    }


_NO_MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": None,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def multipliers(model: Decoder) -> dict[str, Any]:
    """A Granite's multipliers under Hugging Face's names."""
    return {
        "embedding_multiplier": model.embedding_scale,
        "attention_multiplier": model.attention.scale,
        "residual_multiplier": model.blocks[0].residual_scale,
        "logits_scaling": model.logits_scaling,
    }


def no_rope_layers(model: Decoder) -> list[int]:
    """As Hugging Face has it: 1 for each layer with rotary positions, 0 for the others."""
    return [int(block.attention.rotary is not None) for block in model.blocks]


def mindformers(
    section: str | type[LlamaLikeSettings],
    network: str,
    model: str,
    make: Callable[..., Decoder],
    write: Callable[[Decoder], dict[str, Any]] = settings,
    **others: Any,
) -> MindFormers:
    """Settings under LlamaConfig's names, for the architecture whose decoders `make` makes of
    sizes; `section`: a config class of MindFormers that has no others, or its settings."""

    def read(given: Mapping[str, Any]) -> Decoder:
        return make(**sizes_of_settings(given))

    others = {"hidden_act": ("silu",)} | others
    kind = plain_section(section) if isinstance(section, str) else section
    return MindFormers(kind, network, "llama", write, read, model=model, **others)


def plain_section(
    config: str, base: type[LlamaLikeSettings] = LlamaLikeSettings
) -> type[LlamaLikeSettings]:
    """The settings of a config class of MindFormers that has no others than the base's."""
    own = {"type": config, "__annotations__": {"type": Literal.__getitem__(config)}}
    own |= {"__doc__": f"Settings of {config}.", "__module__": __name__}
    return dataclass(frozen=True, kw_only=True)(type(config, (base,), own))


def sizes_of_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `settings`, as `decoder` takes it."""
    head_dim = given["head_dim"] or given["hidden_size"] // given["num_heads"]
    factor = given["partial_rotary_factor"]
    dims = None if factor is None else int(head_dim * factor)
    return shared_settings(given) | {
        "n_kv_heads": given["n_kv_heads"] or given["num_heads"],
        "head_dim": head_dim,
        "intermediate_size": given["intermediate_size"],
        "norm_eps": given["rms_norm_eps"],
        "rotary": Rotary(given["theta"], given["rope_scaling"], dims),
        "qkv_bias": given["qkv_has_bias"],
        "out_bias": given["attn_proj_has_bias"],
        "mlp_bias": given["mlp_bias"],
        "windows": windows_from_settings(given),
        "embedding_scale": given["embedding_multiplier"],
        "scale": given["attention_multiplier"],
        "residual_scale": given["residual_multiplier"],
        "logits_scaling": given["logits_scaling"],
        "rotary_layers": [one == 1 for one in given["no_rope_layers"] or ()],
    }


FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, from config.json."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    slides, given = fields.flag("use_sliding_window", False), fields.raw["sliding_window"]
    window = fields.integer("sliding_window") if slides and given is not None else None
    first, kinds = fields.raw["max_window_layers"], fields.raw.get("layer_types")
    if kinds is None:
        if window is not None and (type(first) is not int or first < 0):
            raise fields.invalid("max_window_layers", first, "an integer from 0")
        return per_layer(window, layers, first if window else 0, None)
    expected = f"a list of {layers}, each {FULL}" + (f" or {SLIDING}" if window else ": no window")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.invalid("layer_types", kinds, expected)
    for kind in kinds:
        if kind != FULL and (kind != SLIDING or window is None):
            raise fields.invalid("layer_types", kind, expected)
    return per_layer(window, layers, 0, kinds)


def read_periodic_windows(fields: Fields, layers: int, period: int) -> tuple[int | None, ...]:
    """As `read_windows`, of a family that has no use_sliding_window; without layer_types every
    `period`th layer has no window."""
    if fields.raw.get("layer_types") is None:
        fields = fields.with_values(layer_types=periodic(layers, period))
    return read_windows(fields.with_values(use_sliding_window=True), layers)


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


def windows_from_settings(given: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Sliding window per layer, from MindFormers settings."""
    window = given["sliding_window"] if given["use_sliding_window"] else None
    kinds, period = given["layer_types"], given["sliding_window_pattern"]
    if kinds is None and period is not None:
        kinds = periodic(given["num_layers"], period)
    return per_layer(window, given["num_layers"], given["max_window_layers"], kinds)


def windows_to_settings(model: Decoder) -> dict[str, Any]:
    """The inverse of `read_windows` and `windows_from_settings`."""
    slides = [window is not None for window in model.windows]
    if not any(slides):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": max(window or 0 for window in model.windows),
        "max_window_layers": slides.index(True),
        "layer_types": [SLIDING if here else FULL for here in slides],
    }


def layer_types(model: Decoder, window: int | None) -> dict[str, Any]:
    """The window, and which layers have it, in config.json; `window`: where none has."""
    given = {"sliding_window": window, "layer_types": [FULL] * model.num_layers}
    return given | {k: v for k, v in windows_to_settings(model).items() if k in given}


_ROPE = {"rope_type": "type", "original_max_position_embeddings": "original_seq_length"}
_DEFAULT_MULTIPLE = 256  # of multiple_of, in every release
# Of LlamaConfig, with the names here made of them.
TRANSLATED = frozenset(
    (
        *("add_qkv_bias", "extend_method", "ffn_dim_multiplier", "multiple_of"),
        *("pretrain_seqlen", "scaling_factor"),
    )
)


def translate(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The width of the feed-forward layers, where a yaml leaves it out, the bias of q, k and v, and
    the scaling of rotary positions."""
    try:
        _translate(raw["model"]["model_config"], defaults, result)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        result.errors.append(
            f"{PREFIX}multiple_of, ffn_dim_multiplier, extend_method or scaling_factor:"
            " expected numbers"
        )


def _translate(given: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    hidden = given.get("hidden_size", defaults.get("hidden_size"))
    multiple, multiplier = given.get("multiple_of"), given.get("ffn_dim_multiplier")
    sized = (multiple, multiplier) != (None, None) or hidden != defaults.get("hidden_size")
    if given.get("intermediate_size") is None and sized:
        multiple = _DEFAULT_MULTIPLE if multiple is None else multiple
        width = feed_forward_width(hidden, multiple, multiplier)
        result.assignments[f"{PREFIX}intermediate_size"] = width
    bias = given.get("add_qkv_bias")
    if bias is not None:
        result.assignments[f"{PREFIX}qkv_has_bias"] = bias
    method = given.get("extend_method")
    scaling = given.get("scaling_factor", 1.0)
    if method in ("PI", "NTK") and not isinstance(scaling, Mapping):
        factor = float(scaling)
        if "scaling_factor" not in given and given.get("pretrain_seqlen"):
            factor = max(1.0, given["seq_length"] / given["pretrain_seqlen"])
        if method == "NTK":  # scales the rotary base
            result.assignments[f"{PREFIX}theta"] = given.get("theta", 10000.0) * factor
        elif factor != 1.0:
            result.assignments[f"{PREFIX}rope_scaling"] = {
                "type": "linear",
                "factor": factor,
                "original_seq_length": round(given["seq_length"] / factor),
            }
    elif method in ("LLAMA3", "YARN") and isinstance(scaling, Mapping):
        named = rope_names(scaling)
        if method == "YARN":
            _set_yarn_attention_factor(named)
        result.assignments[f"{PREFIX}rope_scaling"] = {"type": method.lower(), **named}
    elif method not in (None, "None"):
        result.errors.append(
            f"{PREFIX}extend_method: got {show(method)} with scaling_factor {show(scaling)},"
            " expected None, PI or NTK with a number, or LLAMA3 or YARN with a mapping"
        )


def rope_names(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of rotary positions by our names."""
    return {_ROPE.get(str(name), str(name)): value for name, value in scaling.items()}


def _set_yarn_attention_factor(scaling: dict[str, Any]) -> None:
    """MindFormers (modules/layers.py, FreqsMgr) scales by the quotient of both mscales, always;
    transformers only where neither is 0. Other values stay for the checks."""
    given = {name: scaling[name] for name in ("mscale", "mscale_all_dim") if name in scaling}
    numbers = [scaling.get("factor"), *given.values()]
    if given and all(isinstance(one, (int, float)) and one >= 0 for one in numbers):
        from lite_runner.architectures.positions import yarn_mscale  # imports NumPy

        upper, lower = given.get("mscale", 1.0), given.get("mscale_all_dim", 1.0)
        factor = yarn_mscale(scaling["factor"], upper) / yarn_mscale(scaling["factor"], lower)
        for name in given:
            del scaling[name]
        scaling["attention_factor"] = factor


def feed_forward_width(hidden_size: int, multiple_of: int, multiplier: float | None) -> int:
    """MindFormers' intermediate size of a Llama, where the yaml does not give it."""
    width = 4 * hidden_size
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return multiple_of * -(-width // multiple_of)


def read(fields: Fields) -> Decoder:
    fields.neutral(rope_interleaved=False)  # SmolLM2 has it
    given = llama_like.sizes(fields, positions=2048)
    return llama_like.decoder(architecture="llama", **llama_like.read_biases(fields), **given)


def write(model: Decoder) -> dict[str, Any]:
    return llama_like.shared(model) | {
        "architectures": ["LlamaForCausalLM"],
        **llama_like.biases(model),
    }


def infer_from_gguf(tensors: Container[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF writes Mixtral as llama with experts, Mistral as llama with a sliding window, and some
    Qwen2 as llama with biases on q, k and v only."""
    if given.get("num_experts"):
        return {"model_type": "mixtral"}
    if given.get("sliding_window"):
        return {"model_type": "mistral"}
    qkv, out = (f"blk.0.attn_{name}.bias" in tensors for name in ("q", "output"))
    if qkv and not out:
        return {"model_type": "qwen2"}
    mlp_bias = "blk.0.ffn_up.bias" in tensors
    return {"model_type": "llama", "attention_bias": qkv and out, "mlp_bias": mlp_bias}


_BOOSTED = "LlmBoostForCausalLM"  # the same, computed by Ascend's ATB library in MindFormers


def claims(raw: Mapping[str, Any]) -> bool:
    """True if a yaml of MindFormers is of that network."""
    return bool(network_of(raw) == _BOOSTED)


def _boosted(raw: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation) -> None:
    """The models of that network are a Llama and a Qwen2, which has biases of q, k and v."""
    translate(raw, defaults, result)
    if claims(raw):
        name = raw["model"]["model_config"].get("boost_model_name")
        if name not in ("Llama", "Qwen"):
            expected = "expected 'Llama' or 'Qwen'"
            result.errors.append(f"{PREFIX}boost_model_name: got {show(name)}, {expected}")
        result.assignments[f"{PREFIX}type"] = LlamaSettings.type
        result.assignments.setdefault(f"{PREFIX}qkv_has_bias", name == "Qwen")


@dataclass(frozen=True, kw_only=True)
class LlamaSettings(LlamaLikeSettings):
    """Settings of Llama, Qwen2, Mistral and SmolLM2."""

    type: Literal["LlamaConfig"] = "LlamaConfig"


LLAMA = Architecture(
    "llama",
    read,
    llama_like.NAMES,
    write,
    mindformers(
        LlamaSettings,
        "LlamaForCausalLM",
        "llama2_7b",
        llama_like.decoder,
        also=("ParallelLlamaForCausalLM", _BOOSTED),
        claims=claims,
        unread=frozenset({"kv_channels"}),
        translated=TRANSLATED,
        translate=_boosted,
    ),
    GGUF(
        llama_like.KEYS | llama_like.EXPERT_KEYS | {"sliding_window": "attention.sliding_window"},
        permuted=True,
        infer=infer_from_gguf,
    ),
    no_effect={"pretraining_tp": KERNEL, "is_llama_config": "the same as model_type"},
)
