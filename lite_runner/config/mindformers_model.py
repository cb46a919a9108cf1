"""Translation of model.model_config and moe_config of a MindFormers yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from typing import Any

from lite_runner.architectures.settings import HIDDEN_ACTS, PREFIX
from lite_runner.config.fields import show
from lite_runner.config.yaml_file import at
from lite_runner.records import dataclass

# Translated here, so not listed as ignored.
TRANSLATED = frozenset(
    f"{PREFIX}{name}"
    for name in (
        *("add_qkv_bias", "extend_method", "ffn_dim_multiplier", "hidden_act"),
        "hidden_size_per_attention_head",
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
    expected = HIDDEN_ACTS.get(kind) if isinstance(kind, str) else None
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
    _check_head_size(settings, defaults, result)
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


def _check_head_size(
    settings: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> None:
    """A ChatGLM-6B's heads share hidden_size."""
    name = "hidden_size_per_attention_head"
    hidden, heads = (settings.get(key, defaults.get(key)) for key in ("hidden_size", "num_heads"))
    sizes = [size for size in (hidden, heads) if isinstance(size, int) and size]
    expected = hidden // heads if len(sizes) == 2 else None
    if settings.get(name) not in (None, expected):
        result.faults.append(
            f"{PREFIX}{name}: got {show(settings[name])}, expected hidden_size / num_heads"
        )


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
    if kept := given.get("modules_to_not_convert"):
        result.assignments["modules_to_not_convert"] = kept
    understood.add("modules_to_not_convert")
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
        named = {_ROPE.get(str(name), str(name)): value for name, value in scaling.items()}
        if method == "YARN":
            _set_yarn_attention_factor(named)
        result.assignments[f"{PREFIX}rope_scaling"] = {"type": method.lower(), **named}
    elif method not in (None, "None"):
        result.faults.append(
            f"{PREFIX}extend_method: got {show(method)} with scaling_factor {show(scaling)},"
            " expected None, PI or NTK with a number, or LLAMA3 or YARN with a mapping"
        )


def _set_yarn_attention_factor(scaling: dict[str, Any]) -> None:
    """MindFormers (modules/layers.py, FreqsMgr) scales by the quotient of both mscales, always;
    transformers only where neither is 0. Values that are no such numbers stay for the checks."""
    given = {name: scaling[name] for name in ("mscale", "mscale_all_dim") if name in scaling}
    numbers = [scaling.get("factor"), *given.values()]
    if given and all(isinstance(one, (int, float)) and one >= 0 for one in numbers):
        from lite_runner.architectures.positions import yarn_mscale  # imports NumPy

        upper, lower = given.get("mscale", 1.0), given.get("mscale_all_dim", 1.0)
        factor = yarn_mscale(scaling["factor"], upper) / yarn_mscale(scaling["factor"], lower)
        for name in given:
            del scaling[name]
        scaling["attention_factor"] = factor


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


MIXTURE_CONFIG, MIXTURE_NETWORK = "MixtralConfig", "MixtralForCausalLM"
_LLAMA = ("LlamaForCausalLM", "ParallelLlamaForCausalLM")
EXPERT_SECTIONS = ("model.model_config.moe_config", "moe_config")  # the first that is there
_COUNT, _CHOSEN = "expert_num", "num_experts_chosen"
# What else a router would compute, by the values with which it is a Mixtral's: null means that the
# key may be missing, which is MindFormers' default.
_FIXED: dict[str, tuple[Any, ...]] = {
    "balance_via_topk_bias": (None, False),
    "enable_cold_hot_expert": (None, False),
    "first_k_dense_replace": (None, False, 0),
    "n_group": (None,),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "routing_policy": ("TopkRouterV2",),
    "shared_expert_num": (None, 0),
    "topk_group": (None,),
    "topk_method": (None, "greedy"),
    "use_gating_sigmoid": (None, False),
    "use_shared_expert_gating": (None, False),
}
# Of training, and of how devices share the work. No token is dropped here, whatever the capacity.
_NO_EFFECT = frozenset(
    """
    aux_loss_factor aux_loss_factors aux_loss_types capacity_factor cold_token_percent
    comp_comm_parallel comp_comm_parallel_degree cur_layer enable_sdrop expert_group_size
    expert_model_parallel group_wise_a2a hot_expert_num max_router_load moe_module_name
    moe_shared_expert_overlap router_dense_type save_token_distribution topk_bias_update_rate
    update_step use_allgather_dispatcher use_fused_ops_topkrouter z_loss_factor
    """.split()
)
_INSTEAD = "model=mixtral_8x7b or model=qwen3_30b_a3b has experts, by num_experts"


def has_experts(raw: Mapping[str, Any]) -> bool:
    """True if a file describes a Llama whose layers have experts."""
    several = _section(raw)[1].get(_COUNT) not in (1, None)
    return several and at(raw, "model.arch.type") in _LLAMA


def expert_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of model_config that stand for the experts of such a file."""
    given = _section(raw)[1]
    chosen = given.get(_CHOSEN, 1)
    return {"type": MIXTURE_CONFIG, "num_experts": given[_COUNT], "num_experts_per_tok": chosen}


def ignored_expert_keys(raw: Mapping[str, Any]) -> list[str]:
    """The keys of its experts that have no effect here."""
    section, given = _section(raw)
    return [f"{section}.{name}" for name in given if name in _NO_EFFECT]


def expert_faults(raw: Mapping[str, Any], width: Any, *, mixture: bool) -> Iterator[str]:
    """Errors of a file's experts that cannot be computed.

    `width`: its intermediate_size. `mixture`: the model that it is merged over has experts.
    """
    section, given = _section(raw)
    count = given.get(_COUNT)
    if count in (1, None):
        return
    if not (mixture and has_experts(raw)):
        yield f"{section}.{_COUNT}: {show(count)} is not available: {_INSTEAD}"
        return
    chosen = given.get(_CHOSEN, 1)
    if type(chosen) is int and chosen < 2:
        yield (
            f"{section}.{_CHOSEN}: got {chosen}, expected 2 or more: the probability of a single"
            " expert is not divided by itself in MindFormers, and is in a Mixtral"
        )
    for name, expected in _FIXED.items():
        if (value := given.get(name)) not in expected:
            wanted = show(expected[-1])
            yield f"{section}.{name}: got {show(value)}, expected {wanted}, as in a Mixtral"
    if given.get("moe_intermediate_size", width) != width:
        yield (
            f"{section}.moe_intermediate_size: got {show(given['moe_intermediate_size'])}, expected"
            f" the intermediate_size of {show(width)}, which a Mixtral's experts have"
        )
    known = {*_FIXED, *_NO_EFFECT, _COUNT, _CHOSEN, "moe_intermediate_size"}
    for name in sorted(given.keys() - known):
        yield f"{section}.{name}: no such key of experts"


def _section(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The section of the experts, and its name."""
    for name in EXPERT_SECTIONS:
        if isinstance(found := at(raw, name), Mapping):
            return name, found
    return EXPERT_SECTIONS[-1], {}
