"""Translating a yaml of run_mindformer to our config.

Known keys become settings; keys of training or other engines are ignored and listed; unsupported
keys that would change the result, and unknown keys, are validation errors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lite_runner.config import mindformers_experts as experts
from lite_runner.config.fields import show
from lite_runner.config.mindformers_keys import IGNORED, OFF, PARALLEL_MODES, TOKENIZERS
from lite_runner.config.mindformers_model import RENAMED, TRANSLATED, Translation, translate_model
from lite_runner.config.suggest import did_you_mean, nearest_key
from lite_runner.config.yaml_file import at

_SIZES = ("seq_length", "hidden_size", "num_layers", "num_heads", "vocab_size")
# Ignored where the folder has the sizes (model=auto).
_SIZES_OF_FOLDER = ("model.model_config.seq_length",)
# The model of conf/ to start from, by architecture, for an unknown model_name.
_FAMILY_MODEL = {
    "LlamaForCausalLM": "llama2_7b",
    "Qwen3ForCausalLM": "qwen3_0.6b",
    "Olmo2ForCausalLM": "olmo2_1b",
    "GraniteForCausalLM": "granite3.1_2b",
    "SmolLM3ForCausalLM": "smollm3_3b",
    "GlmForCausalLM": "glm4_9b_hf",
    "Glm4ForCausalLM": "glm4_9b_0414",
    "ChatGLM2ForConditionalGeneration": "glm2_6b",
    "Gemma2ForCausalLM": "gemma2_2b",
    "Gemma3ForCausalLM": "gemma3_1b",
    "Qwen3MoeForCausalLM": "qwen3_30b_a3b",
    "MixtralForCausalLM": "mixtral_8x7b",
    "Phi3ForCausalLM": "phi4",
    "Starcoder2ForCausalLM": "starcoder2_3b",
    "GPTNeoXForCausalLM": "pythia_160m",
    "BloomLMHeadModel": "bloom_560m",
    "GLMForPreTraining": "glm_6b",
    "GPT2LMHeadModel": "gpt2",
}
# The same by the family names of run_infer_main.py.
FAMILIES = {
    "llama": _FAMILY_MODEL["LlamaForCausalLM"],
    "bloom": _FAMILY_MODEL["BloomLMHeadModel"],
    "gpt2": _FAMILY_MODEL["GPT2LMHeadModel"],
    "glm": _FAMILY_MODEL["GLMForPreTraining"],
    "glm2": _FAMILY_MODEL["ChatGLM2ForConditionalGeneration"],
    "glm3": "glm3_6b",
}
# MindFormers' keys by our names. Those of generation_config are the model's defaults here.
_RENAMED = {
    **RENAMED,
    "processor.tokenizer.vocab_file": "processor.tokenizer.tokenizer_file",
    "generation_config.eos_token_id": "eos_token_id",
    "generation_config.max_length": "model.model_config.max_decode_length",
    **{
        f"generation_config.{name}": f"model.model_config.{name}"
        for name in (
            *("do_sample", "max_new_tokens", "repetition_penalty", "temperature"),
            *("top_k", "top_p"),
        )
    },
}
# MindFormers' values by our names.
_RENAMED_VALUES: dict[str, Mapping[str, Any]] = {
    "model.arch.type": {
        "ParallelLlamaForCausalLM": "LlamaForCausalLM",
        "GLMChatModel": "GLMForPreTraining",
    },
    "processor.tokenizer.type": TOKENIZERS,
    "parallel.parallel_mode": PARALLEL_MODES,
}


def base_model(raw: Mapping[str, Any], models: Collection[str]) -> str | None:
    """The model of conf/ that a file is merged over; None where the file names none."""
    name, arch = at(raw, "trainer.model_name"), arch_of(raw)
    if arch is None and at(raw, "pretrained_model_dir"):
        return "auto"  # the folder has the sizes, whatever the model is called
    if isinstance(name, str) and name in models and not experts.has_experts(raw):
        return name
    return _FAMILY_MODEL.get(arch) if isinstance(arch, str) else None


def arch_of(raw: Mapping[str, Any]) -> Any:
    """The architecture that a file names, by our name."""
    named = at(raw, "model.arch.type")
    if experts.has_experts(raw):
        return experts.NETWORK
    return _RENAMED_VALUES["model.arch.type"].get(named, named) if isinstance(named, str) else named


def translate(
    raw: Mapping[str, Any],
    known: Collection[str],
    models: Collection[str],
    *,
    defaults: Mapping[str, Any],
    use_parallel: bool,
    sized: bool,
) -> Translation:
    """Translate a file (`raw`), given the `known` keys of our config.

    `defaults`: the settings of the model that it is merged over. Without `use_parallel` the file's
    parallel sections have no effect, as in run_mindformer. The file must have the sizes unless the
    model is `sized` by conf/.
    """
    result = Translation()
    sections = {key[:i] for key in (*known, *IGNORED) for i, c in enumerate(key) if c == "."}
    for key, value in _leaves(raw, "", known, sections):
        if key.partition(".")[0] in ("parallel", "parallel_config") and not use_parallel:
            result.ignored.append(key.partition(".")[0])
        elif key in _RENAMED:
            if value not in ("", None):
                result.assignments[_RENAMED[key]] = value
        elif key in _RENAMED_VALUES and isinstance(value, str):
            renamed = _RENAMED_VALUES[key].get(value, value)
            result.assignments[key] = arch_of(raw) if key == "model.arch.type" else renamed
        elif key in known:
            result.assignments[key] = value
        elif key in IGNORED or key in _SIZES_OF_FOLDER:
            result.ignored += [] if key in TRANSLATED else [key]
        elif key in sections:
            if value is not None:
                result.faults.append(f"{key}: got {show(value)}, expected a section")
        elif key in OFF:
            continue  # checked below
        else:
            near = nearest_key(key, sorted({*known, *IGNORED}))
            result.faults.append(f"{key}: no such key{did_you_mean(near)}")
    _check_disabled(raw, result)
    settings = at(raw, "model.model_config")
    if isinstance(settings, Mapping):
        translate_model(settings, defaults, models, result)
        _translate_experts(raw, known, result)
        keys = () if sized else (f"model.model_config.{name}" for name in _SIZES)
        for key in (key for key in keys if result.assignments.get(key) is None):
            result.faults.append(f"{key}: missing; a model that is not in conf/model needs it")
    return result


def _translate_experts(raw: Mapping[str, Any], known: Collection[str], result: Translation) -> None:
    """Experts of a Llama become a Mixtral's; their sections are no longer without effect."""
    prefix = "model.model_config."
    width = result.assignments.get(f"{prefix}intermediate_size")
    mixture = f"{prefix}num_experts" in known
    result.faults += experts.faults(raw, width, mixture=mixture)
    if mixture and experts.has_experts(raw):
        result.ignored = [key for key in result.ignored if key not in experts.SECTIONS]
        result.ignored += experts.ignored(raw)
        values = experts.settings(raw).items()
        result.assignments |= {f"{prefix}{name}": value for name, value in values}


def format_keys(keys: Collection[str]) -> str:
    """Dotted keys as text, grouped by section."""
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


def _check_disabled(raw: Mapping[str, Any], result: Translation) -> None:
    for key, (off, instead) in OFF.items():
        value = at(raw, key)
        if not any(type(value) is type(entry) and value == entry for entry in off):
            result.faults.append(f"{key}: {show(value)} is not available: {instead}")
