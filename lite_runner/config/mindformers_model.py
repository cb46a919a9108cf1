"""Translating model.model_config of a MindFormers yaml: sizes, positions, weights, adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from typing import Any

from lite_runner.config.fields import show
from lite_runner.records import dataclass

PREFIX = "model.model_config."
# Translated here, so not listed as ignored.
TRANSLATED = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("add_qkv_bias", "extend_method", "ffn_dim_multiplier", "hidden_act"),
        *("max_position_embeddings", "multiple_of", "pet_config", "pretrain_seqlen"),
        *("quantization_config", "scaling_factor"),
        *("attention_bias", "gmask_token_id", "untie_embeddings_and_output_weights"),
    )
)
# Hugging Face's names of sizes, in newer configs.
RENAMED = {
    f"{PREFIX}{theirs}": f"{PREFIX}{name}"
    for theirs, name in {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "n_kv_heads",
        "rope_theta": "theta",
        "padded_vocab_size": "vocab_size",
        "max_length": "max_decode_length",
    }.items()
}
# dtypes of quantization_config.
_FLOATS = (None, "", "none", "None", "fp16", "bf16", "float16", "bfloat16")
_QUANTS = {("int8", "float"): "a16w8", ("int4", "float"): "a16w4", ("int8", "int8"): "a8w8"}
_ACTIVATIONS = {
    "LlamaConfig": ("silu",),
    "Qwen3Config": ("silu", "swiglu"),
    "Olmo2Config": ("silu",),
    "GraniteConfig": ("silu",),
    "SmolLM3Config": ("silu",),
    "GlmConfig": ("silu",),
    "Glm4Config": ("silu",),
    "Gemma2Config": ("gelu_pytorch_tanh", "gelu"),
    "Phi3Config": ("silu",),
    "Gemma3TextConfig": ("gelu_pytorch_tanh", "gelu"),
    "Qwen3MoeConfig": ("silu", "swiglu"),
    "MixtralConfig": ("silu",),
    "BloomConfig": ("gelu",),
    "GPT2Config": ("gelu",),
}
_LORA = ("pet_type", "lora_rank", "lora_alpha", "target_modules")
_ROPE = {"rope_type": "type", "original_max_position_embeddings": "original_seq_length"}
_DEFAULT_MULTIPLE = 256  # of multiple_of, in every release


@dataclass
class Translation:
    """The result of translating a file."""

    assignments: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    ignored: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def translate_model(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    models: Collection[str],
    result: Translation,
) -> None:
    """Translate keys of a model's section that have no direct equivalent.

    `defaults`: the settings of the model of conf/ that `settings` are merged over.
    """
    kind = settings.get("type", defaults.get("type"))
    expected = _ACTIVATIONS.get(kind) if isinstance(kind, str) else None
    if expected and settings.get("hidden_act") not in (None, *expected):
        result.faults.append(
            f"{PREFIX}hidden_act: got {show(settings['hidden_act'])}, expected {expected[0]}, which"
            f" such models are trained with; --{PREFIX}hidden_act {expected[0]} takes it"
        )
    # In MindFormers a model's name means its published weights; conf/ has their source.
    source = settings.get("checkpoint_name_or_path")
    if source in ("", None) or (isinstance(source, str) and source in models):
        result.assignments.pop(f"{PREFIX}checkpoint_name_or_path", None)
    _translate_adapter(settings.get("pet_config"), result)
    _translate_quantization(settings.get("quantization_config"), result)
    if "gmask_token_id" in settings:
        key = f"{PREFIX}gmask_token_id"
        if kind == "GLMConfig":
            result.assignments[key] = settings["gmask_token_id"]
        else:  # ChatGLM2's have it too, and it is of their training
            result.ignored.append(key)
    if kind == "GPT2Config":
        _translate_positions(settings, defaults, result)
    if kind in ("Qwen3Config", "Qwen3MoeConfig"):
        _translate_qwen3(settings, result)
    if kind == "ChatGLM2Config" and settings.get("add_qkv_bias") is not None:
        result.assignments[f"{PREFIX}qkv_has_bias"] = settings["add_qkv_bias"]
    if kind == "LlamaConfig":
        try:
            _translate_llama(settings, defaults, result)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            result.faults.append(
                f"{PREFIX}multiple_of, ffn_dim_multiplier, extend_method or scaling_factor:"
                " expected numbers"
            )


def _translate_adapter(given: Any, result: Translation) -> None:
    """LoRA weights in the checkpoint (lora), or adapters in their own folders (slora)."""
    section = f"{PREFIX}pet_config"
    if given is None:
        return
    if not isinstance(given, Mapping):
        result.faults.append(f"{section}: got {show(given)}, expected a section")
    elif given.get("pet_type") == "lora":
        result.assignments[section] = {name: given[name] for name in given if name in _LORA}
        result.ignored += [f"{section}.{name}" for name in given if name not in _LORA]
        if given.get("exclude_layers"):
            result.faults.append(
                f"{section}.exclude_layers: got {show(given['exclude_layers'])}, expected null:"
                " target_modules says where the adapter is"
            )
    elif given.get("adapter_path") not in ("", None):
        result.assignments["adapter_path"] = given["adapter_path"]
    else:
        result.ignored.append(section)


def _translate_positions(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> None:
    """GPT-2 has learned position embeddings: max_position_embeddings must equal seq_length."""
    most = settings.get("max_position_embeddings")
    length = settings.get("seq_length", defaults.get("seq_length"))
    if most not in (None, length):
        result.faults.append(
            f"{PREFIX}max_position_embeddings: got {show(most)}, expected the seq_length of"
            f" {show(length)}: the model has a weight for each position"
        )


def _translate_quantization(given: Any, result: Translation) -> None:
    """Round-to-nearest quantization becomes quant=; other methods are errors.

    8-bit activations are quantized dynamically per row, so nothing is calibrated.
    """
    section = f"{PREFIX}quantization_config"
    if given is None:
        return
    if not isinstance(given, Mapping):
        result.faults.append(f"{section}: got {show(given)}, expected a section")
        return
    method, weight, kv = (
        given.get(name) for name in ("quant_method", "weight_dtype", "kvcache_dtype")
    )
    activation = given.get("activation_dtype")
    if method not in (None, "rtn"):
        result.faults.append(
            f"{section}.quant_method: got {show(method)}, expected rtn (rounded to nearest):"
            " nothing is calibrated here"
        )
    if kv == "int8":
        result.assignments["kv_cache"] = "int8"
    elif kv not in _FLOATS:
        result.faults.append(f"{section}.kvcache_dtype: got {show(kv)}, expected int8 or none")
    if weight in _FLOATS and activation in _FLOATS:
        return
    quant = _QUANTS.get((str(weight), "float" if activation in _FLOATS else str(activation)))
    if quant is None:
        result.faults.append(
            f"{section}: got weight_dtype {show(weight)} with activation_dtype {show(activation)},"
            " expected int8 or int4 with fp16, or int8 with int8"
        )
        return
    result.assignments["quant"] = quant
    understood = {"quant_method", "weight_dtype", "activation_dtype", "kvcache_dtype"}
    result.ignored += [f"{section}.{name}" for name in given if name not in understood]


def _translate_llama(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> None:
    hidden = settings.get("hidden_size", defaults.get("hidden_size"))
    multiple, multiplier = settings.get("multiple_of"), settings.get("ffn_dim_multiplier")
    sized = (multiple, multiplier) != (None, None) or hidden != defaults.get("hidden_size")
    if settings.get("intermediate_size") is None and sized:
        multiple = _DEFAULT_MULTIPLE if multiple is None else multiple
        width = feed_forward_width(hidden, multiple, multiplier)
        result.assignments[f"{PREFIX}intermediate_size"] = width
    bias = settings.get("add_qkv_bias")
    if bias is not None:
        result.assignments[f"{PREFIX}qkv_has_bias"] = bias
    method = settings.get("extend_method")
    scaling = settings.get("scaling_factor", 1.0)
    if method in ("PI", "NTK") and not isinstance(scaling, Mapping):
        factor = float(scaling)
        if "scaling_factor" not in settings and settings.get("pretrain_seqlen"):
            factor = max(1.0, settings["seq_length"] / settings["pretrain_seqlen"])
        if method == "NTK":  # scales the rotary base
            result.assignments[f"{PREFIX}theta"] = settings.get("theta", 10000.0) * factor
        elif factor != 1.0:
            result.assignments[f"{PREFIX}rope_scaling"] = {
                "type": "linear",
                "factor": factor,
                "original_seq_length": round(settings["seq_length"] / factor),
            }
    elif method in ("LLAMA3", "YARN") and isinstance(scaling, Mapping):
        result.assignments[f"{PREFIX}rope_scaling"] = {
            "type": method.lower(),
            **{_ROPE.get(name, name): value for name, value in scaling.items()},
        }
    elif method not in (None, "None"):
        result.faults.append(
            f"{PREFIX}extend_method: got {show(method)} with scaling_factor {show(scaling)},"
            " expected None, PI or NTK with a number, or LLAMA3 or YARN with a mapping"
        )


def _translate_qwen3(settings: Mapping[str, Any], result: Translation) -> None:
    if settings.get("attention_bias") is not None:
        for name in ("qkv_has_bias", "attn_proj_has_bias"):
            result.assignments[f"{PREFIX}{name}"] = settings["attention_bias"]
    if settings.get("untie_embeddings_and_output_weights") is not None:
        untied = bool(settings["untie_embeddings_and_output_weights"])
        result.assignments[f"{PREFIX}tie_word_embeddings"] = not untied
    scaling = settings.get("rope_scaling")
    if isinstance(scaling, Mapping):
        result.assignments[f"{PREFIX}rope_scaling"] = {
            _ROPE.get(name, name): value for name, value in scaling.items()
        }


def feed_forward_width(hidden_size: int, multiple_of: int, multiplier: float | None) -> int:
    """MindFormers' intermediate size of a Llama, where the yaml does not give it."""
    width = 4 * hidden_size
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return multiple_of * -(-width // multiple_of)
