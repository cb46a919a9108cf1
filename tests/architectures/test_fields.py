"""Every field of transformers' config classes is followed, refused, or known to change nothing."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lite_runner import architectures
from lite_runner.architectures import KNOWN, Architecture, of_gguf, of_mindformers
from lite_runner.architectures.fields import NO_EFFECT
from lite_runner.architectures.spec import Decoder
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from tests.paths import FIXTURES

ARCHITECTURES = Path(architectures.__file__).parent
CLASSES: dict[str, Any] = json.loads(
    (FIXTURES / "config_classes.json").read_text(encoding="utf-8")
)["classes"]
FIELDS = [(name, field) for name in CLASSES for field in CLASSES[name]["defaults"]]
# Another value than the default; where there is none here: not a flag, twice a number, 1 for null.
OTHER: dict[str, Any] = {
    "decoder_sparse_step": 3,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-3,
    "layer_types": ["sliding_attention"] + ["full_attention"] * 63,
    "mlp_only_layers": [0],
    "n_group": 4,
    "n_inner": 100,
    "no_rope_layers": [0] * 64,
    "num_key_value_heads": 1,
    "quantization_bit": 4,
    "pad_token_id": 3,
    "per_layer_config": {"0": {}},
    "pruned_heads": {"0": [1]},
    "layers_block_type": ["full_attention"] * 64,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "rotary": {"base": 500, "type": "dynamic"},
    "topk_group": 2,
}
# What a field needs beside it to mean anything.
BESIDE: dict[str, dict[str, Any]] = {
    "intermediate_size": {"mlp_only_layers": [0]},
    "layer_types": {"use_sliding_window": True, "sliding_window": 8},
    "multi_query_group_num": {"multi_query_attention": True},
    "moe_topk": {"num_experts": 4},
    "n_group": {"topk_method": "group_limited_greedy"},
    "num_kv_heads": {"new_decoder_architecture": True},
    "num_ln_in_parallel_attn": {"new_decoder_architecture": True},
    "topk_group": {"topk_method": "group_limited_greedy", "n_group": 4},
    "max_window_layers": {"use_sliding_window": True, "max_window_layers": 1},
    "original_max_position_embeddings": {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        }
    },
    "pretraining_tp": {"slow_but_exact": True},
    "slow_but_exact": {"pretraining_tp": 2},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 0},
    "use_sliding_window": {"sliding_window": 8, "max_window_layers": 0},
}
# Of Qwen2-MoE the first layers have windows.
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
_EXPERTS |= {"moe_intermediate_size": 16}
BESIDE_OF: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4_text": dict.fromkeys(_EXPERTS, _EXPERTS)
    | {"use_double_wide_mlp": {"num_kv_shared_layers": 6}},
    "llama4_text": {"intermediate_size_mlp": {"interleave_moe_layer_step": 2}},
    "deepseek_v2": {"intermediate_size": {"first_k_dense_replace": 1}},
    "granitemoehybrid": {
        key: {"position_embedding_type": "rope"} for key in ("rope_parameters", "rope_theta")
    },
    "qwen2_moe": dict.fromkeys(("layer_types", *_WINDOWS), _WINDOWS),
}
# What published config.json files have beside the fields of the classes.
PUBLISHED = {
    "bloom": {
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "n_embed": 1024,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
        "unk_token_id": 0,
    },
    "chatglm": {
        "_name_or_path": "THUDM/chatglm3-6b",
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"},
        "num_hidden_layers": 28,
        "original_rope": True,
        "use_cache": True,
        "torch_dtype": "float16",
    },
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"},
    "gemma3_text": {
        "_sliding_window_pattern": 6,
        "cache_implementation": "hybrid",
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
    },
    "gpt2": {"n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True}}},
    "llama": {
        "_name_or_path": "checkpoints",
        "auto_map": {"AutoConfig": "configuration.Config"},
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"dtype": {"q4": "q4"}},
    },
    "gpt_neox": {
        "attention_probs_dropout_prob": 0,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "torch_dtype": "float16",
    },
    "phi3": {
        "attention_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    },
    "qwen2": {"use_mrope": False},
    "starcoder2": {
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_type": "layer_norm",
        "rope_theta": 999999.4420358813,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
    },
    "qwen3_moe": {"max_window_layers": 48, "head_dim": 128},
}
# Where the defaults of a class contradict each other.
SOUND = {
    "starcoder2": {"bos_token_id": 0, "eos_token_id": 0},  # 50256 of 49152 tokens
    "glm4_moe": {"head_dim": 128},  # 96 heads, and a hidden size of 4096
}
# With these, another value is refused in every family, though no class declares them.
REFUSED = {
    "add_cross_attention": True,
    "is_causal": False,
    "is_encoder_decoder": True,
    "per_layer_config": OTHER["per_layer_config"],
    "pruned_heads": OTHER["pruned_heads"],
    "quantization_config": {"quant_method": "gptq"},
}


def read(name: str, **changes: Any) -> Decoder | str:
    """The config.json with all defaults but `changes` (Ellipsis: absent), read, or the error."""
    raw = {"model_type": name, **CLASSES[name]["defaults"], **SOUND.get(name, {}), **changes}
    counts = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    layers = next((raw[key] for key in counts if key in raw), None)  # None: the list tells
    listed = ("layer_types", "layers_block_type", "no_rope_layers")
    raw |= {key: raw[key][:layers] for key in listed if isinstance(raw.get(key), list)}
    try:
        return model_config_from_hf(
            {key: value for key, value in raw.items() if value is not ...}, "config.json"
        )
    except ArtifactError as error:
        return str(error)


def other(field: str, default: Any) -> Any:
    """A value other than the default."""
    if field in OTHER:
        return OTHER[field]
    if default is None:
        return 1
    if isinstance(default, bool):
        return not default
    return f"not {default}" if isinstance(default, str) else 2 * default or 1


def beside(name: str, field: str) -> dict[str, Any]:
    """The fields that `field` needs beside it, as far as the class has them."""
    given = CLASSES[name]["defaults"]
    needed = BESIDE_OF.get(name, BESIDE).get(field, BESIDE.get(field, {}))
    return {key: one for key, one in needed.items() if key in given}


def is_decided(name: str, field: str, found: Decoder | str, plain: Decoder | str) -> bool:
    """True if `found`, read with another value of `field` than `plain`, follows or refuses it."""
    assert isinstance(plain, Decoder), plain
    return field in found if isinstance(found, str) else found != plain


def test_no_rope_layers_of_llama4_has_a_value_of_each_layer() -> None:
    layers = CLASSES["llama4_text"]["defaults"]["num_hidden_layers"]
    for listed in (1, [1] * (layers - 1), [1] * (layers - 1) + [2]):
        assert f"expected {layers} times 0 or 1" in str(read("llama4_text", no_rope_layers=listed))


def test_every_family_is_walked() -> None:
    ours = {"iflytekspark", "pangualpha"}  # whose config.json nobody else has
    assert CLASSES.keys() | ours == {n for n, one in KNOWN.items() if one.write is not None}


def test_every_field_is_followed_refused_or_without_effect() -> None:
    wrong = []
    for name, field in FIELDS:
        known = NO_EFFECT.keys() | KNOWN[name].no_effect.keys()
        companions = beside(name, field)
        value = other(field, companions.get(field, CLASSES[name]["defaults"][field]))
        found, plain = read(name, **companions | {field: value}), read(name, **companions)
        if field in known:
            if found != plain:
                wrong.append(f"{name}.{field} is listed as without effect, but has one")
            continue
        if isinstance(plain, str):  # refused beside its companions: alone, too, or they are
            plain = read(name)
        if not is_decided(name, field, found, plain):
            wrong.append(f"{name}.{field}={value} changes nothing")
    assert not wrong


def test_no_note_on_fields_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    for name in CLASSES:
        model = read(name, **PUBLISHED.get(name, {}))
        assert isinstance(model, Decoder)
        assert model_config_from_hf(hf_from_model_config(model), "config.json") == model, name
        stderr = capsys.readouterr().err.splitlines()  # of layers, which classes have by default
        further = "config.json: layers for multi-token prediction are read by speculate=mtp alone"
        assert (name, [line for line in stderr if line != further]) == (name, [])
        if name in ("deepseek_v3", "glm4_moe"):
            assert further in stderr


def test_other_names_of_a_field() -> None:
    aliases = [(name, *one) for name in CLASSES for one in CLASSES[name]["aliases"].items()]
    wrong = []
    for name, alias, field in aliases:
        value = other(field, CLASSES[name]["defaults"][field])
        if field == "layer_types":  # of the only family with another name for it
            value = ["full_attention"] * 64
        found = read(name, **{field: ..., alias: value})
        same = found == read(name, **{field: value})
        known = alias in KNOWN[name].no_effect
        if not same or not (known or is_decided(name, alias, found, read(name))):
            wrong.append(f"{name}.{alias}")
    assert aliases and not wrong


def test_a_missing_field_has_the_default_of_transformers() -> None:
    wrong = []
    for name, field in FIELDS:
        found = read(name, **{field: ...})
        if isinstance(found, str):
            right = " is None, expected an integer" in found  # required here
        else:  # absent: none, unless another file beside it has them
            right = field.endswith("_token_id") or found == read(name)
            right |= (name, field) == ("baichuan", "max_position_embeddings")  # ALiBi, then
        if not right:
            wrong.append(f"{name}.{field}")
    assert not wrong


def test_the_dynamic_scaling_of_a_hunyuan_is_another_base() -> None:
    for given, head_dim in ((None, 128), (64, 64)):
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0}
        found = read("hunyuan_v1_dense", head_dim=given, rope_parameters=rope)
        assert isinstance(found, Decoder) and found.rotary is not None
        assert found.rotary.theta == pytest.approx(1e4 * 1000 ** (head_dim / (head_dim - 2)))
        assert found.rotary.scaling is None


def test_the_published_code_of_baichuan_ties_no_head() -> None:
    found = read("baichuan", tie_word_embeddings=True)
    assert isinstance(found, str) and "tie_word_embeddings=true is not supported" in found


def test_variants_of_any_family_are_refused() -> None:
    for name in CLASSES:
        for field, value in REFUSED.items():
            found = read(name, **{field: value})
            expected = "GPTQ is not read" if field == "quantization_config" else field
            assert isinstance(found, str) and expected in found, (name, field, found)


def test_unknown_fields_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    strange = {"attn_sink": 4, "nothing": None, "use_cache": False, "rope_scaling": {"turns": 2}}
    assert read("llama", **strange) == read("llama")
    assert capsys.readouterr().err == (
        "config.json: attn_sink, rope_scaling.turns: not a field of llama, and not followed\n"
    )
    many = {f"field_{index}\x1b": 0 for index in range(9)}
    assert read("llama", **many) == read("llama")
    note = capsys.readouterr().err
    assert "'field_7\\x1b' and 1 more: not a field" in note and "\x1b" not in note


@pytest.mark.parametrize(("given", "near"), [("qwen2.5", "qwen2"), ("LLaMA", "llama")])
def test_another_model_type_gets_the_nearest(given: str, near: str) -> None:
    with pytest.raises(ArtifactError, match=rf"expected one of bloom, .*; did you mean {near}\?"):
        model_config_from_hf({"model_type": given}, "config.json")


@pytest.mark.parametrize("given", ["falcon_h1", "mamba2"])
def test_another_family_is_not_a_misspelt_one(given: str) -> None:
    with pytest.raises(ArtifactError, match=rf"model_type is '{given}', expected one of") as raised:
        model_config_from_hf({"model_type": given}, "config.json")
    assert "did you mean" not in raised.value.message


def test_the_tables_name_each_architecture() -> None:
    """By which one is found before it is imported: its module, and MindFormers' config class."""
    there = {
        one.name
        for path in ARCHITECTURES.glob("*.py")
        for one in vars(import_module(f"lite_runner.architectures.{path.stem}")).values()
        if isinstance(one, Architecture)
    }
    assert list(KNOWN) == [one.name for one in KNOWN.values()] and there == set(KNOWN)
    for one in KNOWN.values():
        if one.mindformers is not None:
            found = of_mindformers(one.mindformers.config)
            assert found is not None and found.section is one.mindformers.section
    every = [(one, one.gguf) for one in KNOWN.values() if one.gguf is not None]
    names = [gguf.name or one.name for one, gguf in every]
    assert [of_gguf(name) for name in names] == every, "two have the same name in GGUF files"
