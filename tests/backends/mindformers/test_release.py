"""What MindFormers 1.0.2 can compute, and how its yaml describes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lite_runner.architectures.spec import RopeScaling
from lite_runner.backends.mindformers.release import (
    Sizes,
    computed_in,
    hidden_tokens,
    model_section,
    pad_token,
    rows_together,
    static_length,
    tensor_name,
    unsupported,
)
from tests.models import model_named, reference_model

SIZES = Sizes(batch=2, length=20, dtype="float32", use_past=True)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("bloom", ""),
        ("gpt2", ""),
        ("gpt2_inner", "its feed-forward is a multiple of hidden_size"),
        ("llama", "its heads have hidden_size / num_heads dimensions"),
        ("llama_tied_mha", ""),
        ("llama_rope_linear", "dimensions, not 16"),
        ("llama_rope_llama3", "it has no llama3 scaling of rotary positions"),
        ("llama_biases", "biases on q, k and v only"),
        ("qwen2", ""),
        ("qwen2_window", "no sliding windows"),
        ("qwen3", "it has no Qwen3Config"),
        ("chatglm", "its heads have hidden_size / num_heads dimensions"),
        ("glm4", "it has no Glm4Config"),
    ],
)
def test_what_it_cannot_compute(case: str, reason: str) -> None:
    found = "; ".join(unsupported(reference_model(case)))
    assert reason in found and bool(reason) == bool(found)


def test_an_epsilon_of_layernorm() -> None:
    bloom = reference_model("bloom")
    other = replace(bloom, norm=replace(bloom.norm, eps=1e-6))
    assert unsupported(other) == ["its LayerNorm has an epsilon of 1e-05, not 1e-06"]


def test_a_llama_as_yaml() -> None:
    model = reference_model("llama_tied_mha")
    assert model.rotary is not None
    scaled = model.with_rope_scaling(RopeScaling("linear", 4.0, original_seq_length=8))
    section = model_section(scaled, SIZES)
    assert section["arch"] == {"type": "LlamaForCausalLM"}
    settings = section["model_config"]
    assert settings["type"] == "LlamaConfig"
    assert (settings["batch_size"], settings["seq_length"]) == (2, 20)
    assert (settings["extend_method"], settings["scaling_factor"]) == ("PI", 4.0)
    assert settings["max_position_embedding"] == model.seq_length
    plain = model_section(model, SIZES)["model_config"]
    assert (plain["extend_method"], plain["theta"]) == ("None", model.rotary.theta)
    assert plain["n_kv_heads"] == model.n_kv_heads


def test_what_depends_on_the_family() -> None:
    bloom, gpt2, llama = (model_named(f"tiny_{name}") for name in ("bloom", "gpt2", "llama"))
    assert [static_length(model, 20) for model in (bloom, gpt2)] == [20, gpt2.seq_length]
    assert computed_in(bloom, "float32", use_past=True) == "float16"
    assert computed_in(bloom, "float32", use_past=False) == "float32"
    assert computed_in(gpt2, "float32", use_past=True) == "float32"
    ends = bloom.eos_token_id[:1]
    assert (
        hidden_tokens(bloom, use_past=True) == () and hidden_tokens(bloom, use_past=False) == ends
    )
    assert hidden_tokens(gpt2, use_past=True) == gpt2.eos_token_id[:1]
    assert hidden_tokens(llama, use_past=True) == (llama.pad_token_id,)
    glm2 = reference_model("chatglm")
    assert [rows_together(glm2, 3, use_past=past) for past in (True, False)] == [1, 3]
    assert rows_together(llama, 3, use_past=True) == 3
    assert tensor_name(glm2, "transformer.embedding.embedding_weight").endswith("embedding_table")
    assert tensor_name(llama, "lm_head.weight") == "lm_head.weight"
    without = replace(llama, pad_token_id=None)
    assert pad_token(without) == llama.eos_token_id[0]
    assert pad_token(replace(without, eos_token_id=())) == 0
