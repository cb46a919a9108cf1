"""A yaml file of run_mindformer, laid over our config: what of it means something here.

Known keys become settings, what only concerns training or another engine is listed, what
would change the result and cannot be done is a fault, and so is a key of neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lite_runner.config.fields import show
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.errors import ConfigError

MAX_FILE_BYTES = 1 << 20

# Sections and keys that concern training, profiling, other engines or a cloud platform only.
_IGNORED = {
    "": """
        auto_tune autotune_per_step callbacks data_parallel_size do_eval eval_callbacks eval_dataset
        eval_dataset_task eval_epoch_interval eval_step_interval filepath_prefix
        init_start_profile layer_decay layer_scale load_transformed_checkpoint lr_scale
        lr_scale_factor lr_schedule metric micro_batch_interleave_num moe_config monitor_config
        optimizer profile profile_communication profile_memory profile_start_step
        profile_stop_step recompute_config remote_save_url resume_training runner_config
        runner_wrapper swap_config train_dataset train_dataset_task train_precision_sync
        infer_precision_sync transform_process_num
    """,
    "context": """
        affinity_cpu_list ascend_config deterministic enable_graph_kernel graph_kernel_flags
        jit_config jit_level max_call_depth max_device_memory memory_optimize_level
        memory_offload mempool_block_size op_timeout precompile_only runtime_num_threads
        save_graphs save_graphs_path
    """,
    "parallel": """
        dataset_strategy enable_alltoall enable_parallel_optimizer full_batch gradients_mean
        loss_repeated_mean parallel_optimizer_config pipeline_config search_mode
        strategy_ckpt_config strategy_ckpt_load_file
    """,
    "parallel_config": """
        context_parallel context_parallel_algo expert_parallel gradient_aggregation_group
        mem_coeff micro_batch_num optimizer_shard recompute seq_split_num use_seq_parallel
    """,
    "processor": "audio_processor image_processor return_tensors type",
    "processor.tokenizer": """
        add_bos_token add_eos_token add_prefix_space additional_special_tokens bos_token
        chat_template eos_token errors mask_token merges_file model_max_length pad_token
        padding_side unk_token use_fast
    """,
    "model.model_config": """
        attention_dropout_rate batch_size block_size chunk_prefill compute_in_2d
        embedding_init_type enable_slice_dp extend_method ffn_dim_multiplier
        fine_grain_interleave fused_rms_norm hidden_act hidden_dropout_rate
        ignore_token_id init_method_std initializer_range is_dynamic
        layernorm_compute_type max_position_embedding mlp_concat multiple_of num_blocks offset
        parallel_optimizer param_init_type pet_config pp_interleave_num pretrain_seqlen
        qkv_concat quant quantization_config recompute rotary_dtype scaling_factor
        softmax_compute_type use_attn_mask_compression use_flash_attention
        use_fused_rope use_fused_swiglu use_kbk_infer use_load_balance use_paged_attention
        use_past_shard use_ring_attention use_rope_slice use_select_recompute
        use_seq_parallel
    """,
    "infer": "device_id dynamic infer_type model_name rank_id target",
    "trainer": "dataset_dir image_size",
}
IGNORED = frozenset(
    f"{section}.{name}".lstrip(".") for section, names in _IGNORED.items() for name in names.split()
)

# Read by `_translate_model`, so never listed as without a meaning.
_UNDERSTOOD = frozenset(
    f"model.model_config.{name}"
    for name in (
        *("extend_method", "ffn_dim_multiplier", "hidden_act", "multiple_of"),
        *("pretrain_seqlen", "quantization_config", "scaling_factor"),
    )
)

# Values that mean "off"; any other asks for something that is not there.
_OFF: dict[str, tuple[Any, ...]] = {
    "profile": (False, None),
    "moe_config.expert_num": (1, None),
    "model.model_config.mlp_concat": (False, None),
    "model.model_config.qkv_concat": (False, None),
    "model.model_config.quant": ("", None),
    "model.model_config.pet_config.pet_type": ("slora", "", None),
}
# Names of types in quantization_config; what is not there stays a float.
_FLOATS = (None, "", "none", "None", "fp16", "bf16", "float16", "bfloat16")
_QUANTS = {("int8", "float"): "a16w8", ("int4", "float"): "a16w4", ("int8", "int8"): "a8w8"}
_ACTIVATIONS = {"LlamaConfig": "silu", "BloomConfig": "gelu", "GPT2Config": "gelu"}
_SIZES = ("seq_length", "hidden_size", "num_layers", "num_heads", "vocab_size")
# The model of ours to start from for a file whose model_name is not one of ours.
_FAMILY_MODEL = {
    "LlamaForCausalLM": "llama2_7b",
    "BloomLMHeadModel": "bloom_560m",
    "GPT2LMHeadModel": "gpt2",
}


@dataclass
class Translation:
    """What a file comes to."""

    assignments: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    ignored: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class _StrictLoader(yaml.SafeLoader):
    """Safe yaml in which 1e-6 is a number and a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            if isinstance(key, (str, int)):
                seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a yaml file. Raises ConfigError: missing, too large, broken, empty."""
    where = f"--config {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{where}: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{where}: more than {MAX_FILE_BYTES} bytes; not a config")
    try:
        raw = yaml.load(data, _StrictLoader)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: broken yaml: {' '.join(str(error).split())}") from None
    if raw is None:
        raise ConfigError(f"{where}: the file is empty; expected a yaml of sections")
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: got a {type(raw).__name__}, expected sections (a mapping)")
    return raw


def base_model(raw: Mapping[str, Any], models: Collection[str]) -> str | None:
    """The model of conf/ that a file starts from; None where the file names none."""
    name = at(raw, "trainer.model_name")
    if isinstance(name, str) and name in models:
        return name
    arch = at(raw, "model.arch.type")
    return _FAMILY_MODEL.get(arch) if isinstance(arch, str) else None


def translate(
    raw: Mapping[str, Any],
    known: Collection[str],
    models: Collection[str],
    *,
    use_parallel: bool,
    sized: bool,
) -> Translation:
    """What of a file (`raw`) means something here, given the `known` keys of our config.

    With `use_parallel` off the file's cards have no meaning, as in run_mindformer. Unless the
    model is `sized` by conf/ the file must give the sizes.
    """
    result = Translation()
    sections = {key[:i] for key in (*known, *IGNORED) for i, c in enumerate(key) if c == "."}
    for key, value in _leaves(raw, "", known, sections):
        if key.partition(".")[0] in ("parallel", "parallel_config") and not use_parallel:
            result.ignored.append(key.partition(".")[0])
        elif key in known:
            result.assignments[key] = value
        elif key in IGNORED:
            result.ignored += [] if key in _UNDERSTOOD else [key]
        elif key in sections:
            if value is not None:
                result.faults.append(f"{key}: got {show(value)}, expected a section")
        elif key == "processor.tokenizer.vocab_file":
            result.assignments["processor.tokenizer.tokenizer_file"] = value
        else:
            near = nearest_key(key, sorted({*known, *IGNORED}))
            result.faults.append(f"{key}: no such key{did_you_mean(near)}")
    _check_off(raw, result)
    settings = at(raw, "model.model_config")
    if isinstance(settings, Mapping):
        _translate_model(settings, models, result)
        missing = [] if sized else [name for name in _SIZES if settings.get(name) is None]
        for name in missing:
            result.faults.append(
                f"model.model_config.{name}: missing; a model that is not in conf/model needs it"
            )
    return result


def listed(keys: Collection[str]) -> str:
    """Dotted keys for a sentence, those of a section in its brackets."""
    sections: dict[str, list[str]] = {}
    for key in sorted(set(keys)):
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    top = sections.pop("", [])
    return ", ".join([*top, *(f"{name} ({', '.join(keys)})" for name, keys in sections.items())])


def _leaves(
    raw: Mapping[str, Any], prefix: str, known: Collection[str], sections: Collection[str]
) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        key = f"{prefix}{name}"
        is_section = key in sections and key not in known and key not in IGNORED
        if is_section and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.", known, sections)
        else:
            yield key, value


def _check_off(raw: Mapping[str, Any], result: Translation) -> None:
    for key, off in _OFF.items():
        value = at(raw, key)
        if not any(type(value) is type(entry) and value == entry for entry in off):
            result.faults.append(f"{key}: {show(value)} is not available yet")


def _translate_model(
    settings: Mapping[str, Any], models: Collection[str], result: Translation
) -> None:
    """Sizes and positions that MindFormers writes in another way than we do."""
    prefix = "model.model_config."
    kind = settings.get("type")
    expected = _ACTIVATIONS.get(kind) if isinstance(kind, str) else None
    if expected and settings.get("hidden_act") not in (None, expected):
        got = show(settings["hidden_act"])
        result.faults.append(f"{prefix}hidden_act: got {got}, expected {expected}")
    adapters = at(settings, "pet_config.adapter_path")
    if adapters not in ("", None):
        result.assignments["adapter_path"] = adapters
        result.ignored.remove(f"{prefix}pet_config")  # the rest of it each adapter says itself
    # A model's name is MindFormers' way to say: its usual weights. Ours are in conf/.
    source = settings.get("checkpoint_name_or_path")
    if source in ("", None) or (isinstance(source, str) and source in models):
        result.assignments.pop(f"{prefix}checkpoint_name_or_path", None)
    _translate_quantization(settings.get("quantization_config"), result)
    if kind == "LlamaConfig":
        try:
            _translate_llama(settings, result)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            result.faults.append(
                f"{prefix}multiple_of, ffn_dim_multiplier, extend_method or scaling_factor:"
                " expected numbers"
            )


def _translate_quantization(given: Any, result: Translation) -> None:
    """Weights as integers by rounding to nearest, which is ours too; what else there is, is said.

    Activations of 8 bits are scaled here row by row as they come, so nothing is calibrated.
    """
    section = "model.model_config.quantization_config"
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


def _translate_llama(settings: Mapping[str, Any], result: Translation) -> None:
    prefix = "model.model_config."
    sized = "multiple_of" in settings or "ffn_dim_multiplier" in settings
    if settings.get("intermediate_size") is None and sized:
        result.assignments[f"{prefix}intermediate_size"] = feed_forward_width(
            settings["hidden_size"],
            settings.get("multiple_of", 256),
            settings.get("ffn_dim_multiplier"),
        )
    method = settings.get("extend_method")
    scaling = settings.get("scaling_factor", 1.0)
    if method in ("PI", "NTK") and not isinstance(scaling, Mapping):
        factor = float(scaling)
        if "scaling_factor" not in settings and settings.get("pretrain_seqlen"):
            factor = max(1.0, settings["seq_length"] / settings["pretrain_seqlen"])
        if method == "NTK":  # a wider base of the frequencies, whatever the length
            result.assignments[f"{prefix}theta"] = settings.get("theta", 10000.0) * factor
        elif factor != 1.0:
            result.assignments[f"{prefix}rope_scaling"] = {
                "type": "linear",
                "factor": factor,
                "original_seq_length": round(settings["seq_length"] / factor),
            }
    elif method in ("LLAMA3", "YARN") and isinstance(scaling, Mapping):
        renamed = {"original_max_position_embeddings": "original_seq_length"}
        result.assignments[f"{prefix}rope_scaling"] = {
            "type": method.lower(),
            **{renamed.get(name, name): value for name, value in scaling.items()},
        }
    elif method not in (None, "None"):
        result.faults.append(
            f"{prefix}extend_method: got {show(method)} with scaling_factor {show(scaling)},"
            " expected None, PI or NTK with a number, or LLAMA3 or YARN with a mapping"
        )


def feed_forward_width(hidden_size: int, multiple_of: int, multiplier: float | None) -> int:
    """MindFormers' width of a llama's feed-forward layer, where the yaml does not give it."""
    width = 4 * hidden_size
    if multiplier is not None:
        width = int((multiplier + 0.01) * width)
    width = int(2 * width / 3)
    return multiple_of * -(-width // multiple_of)


def put(raw: dict[str, Any], key: str, text: str) -> None:
    """Lay a flag of run_mindformer over a file's data, its text read as yaml."""
    *sections, name = key.split(".")
    for section in sections:
        below = raw.get(section)
        raw[section] = dict(below) if isinstance(below, Mapping) else {}
        raw = raw[section]
    try:
        raw[name] = yaml.safe_load(text)
    except yaml.YAMLError:
        raw[name] = text


def is_only_mindformers(key: str) -> bool:
    """Whether a dotted key, or a section it is in, is MindFormers' and not ours."""
    parts = key.split(".")
    return any(".".join(parts[:i]) in IGNORED for i in range(1, len(parts) + 1))


def at(raw: Any, key: str) -> Any:
    """The value of a dotted key in nested data; None where there is none."""
    for name in key.split("."):
        raw = raw.get(name) if isinstance(raw, Mapping) else None
    return raw
