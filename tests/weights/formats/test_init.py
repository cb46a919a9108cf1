from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lite_runner.architectures.spec import Decoder, Norm, RopeScaling, Rotary
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf
from tests.each import each
from tests.sizes import ModelConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "vocab_size": 250880,
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "layer_norm_epsilon": 1e-5,
    "seq_length": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "n_ctx": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 24,
    "eos_token_id": 151643,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def read(raw: dict[str, Any], **changes: Any) -> Decoder:
    return model_config_from_hf(raw | changes, "config.json")


def test_llama() -> None:
    assert read(LLAMA) == ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        n_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        seq_length=131072,
        norm_eps=1e-5,
        tie_word_embeddings=False,
        theta=500000.0,
        bos_token_id=128000,
        eos_token_id=(128001, 128008),
    )
    assert read(LLAMA, head_dim=64).head_dim == 64
    assert read(LLAMA, head_dim=None, num_key_value_heads=None).n_kv_heads == 32
    assert read(LLAMA, pad_token_id=-1).pad_token_id is None  # as older conversions say "none"


def test_bloom() -> None:
    config = read(BLOOM)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (1024, 24, 16)
    assert (config.head_dim, config.intermediate_size, config.seq_length) == (64, 4096, 2048)
    assert config.tie_word_embeddings and config.pad_token_id == 3
    newer = {"hidden_size": 1024, "n_head": 16, "n_inner": None}
    raw = {
        key: value for key, value in BLOOM.items() if key not in ("n_embed", "num_attention_heads")
    }
    assert read(raw, **newer) == config
    assert read(BLOOM, slow_but_exact=True, pretraining_tp=1) == config
    assert read(BLOOM, slow_but_exact=False, pretraining_tp=4) == config


@pytest.mark.parametrize(
    ("raw", "both", "field", "taken"),
    [  # what BloomConfig and GPT2Config of transformers 5.23 make of them
        (BLOOM, {"n_embed": 64, "hidden_size": 32}, "hidden_size", 64),
        (BLOOM, {"n_head": 2, "num_attention_heads": 4}, "num_heads", 4),
        (BLOOM, {"n_layer": 1, "num_hidden_layers": 3}, "num_layers", 3),
        (GPT2, {"n_embd": 24, "hidden_size": 48}, "hidden_size", 48),
        (GPT2, {"n_positions": 48, "max_position_embeddings": 64, "n_ctx": 99}, "seq_length", 64),
    ],
)
def test_of_two_names_of_a_size_the_one_that_transformers_takes(
    raw: dict[str, Any], both: dict[str, Any], field: str, taken: int
) -> None:
    assert getattr(read(raw, **both), field) == taken


def test_gpt2() -> None:
    config = read(GPT2)
    assert (config.hidden_size, config.head_dim, config.intermediate_size) == (768, 64, 3072)
    assert config.seq_length == 1024 and config.eos_token_id == (50256,)
    assert read(GPT2, n_inner=1000).intermediate_size == 1000


def test_qwen2() -> None:
    config = read(QWEN2)
    assert (
        config.architecture == "qwen2" and config.attention.qkv_bias and config.tie_word_embeddings
    )
    assert (config.n_kv_heads, config.head_dim, config.rotary.theta) == (2, 64, 1e6)


def test_qwen3() -> None:
    model = read(QWEN3)
    attention = model.attention
    assert (model.architecture, model.seq_length, model.head_dim) == ("qwen3", 40960, 128)
    assert attention.qk_norm == Norm("rms", 1e-6) and set(model.windows) == {None}
    assert not (attention.qkv_bias or attention.out_bias or model.feed_forward.bias)
    biased = read(QWEN3, attention_bias=True)
    assert biased.attention == replace(attention, qkv_bias=True, out_bias=True)
    assert read(QWEN3, head_dim=None).head_dim == 64  # null: the heads share what is hidden
    absent = {key: QWEN3[key] for key in QWEN3 if key not in ("head_dim", "num_key_value_heads")}
    absent["num_attention_heads"] = 64
    assert (read(absent).head_dim, read(absent).n_kv_heads) == (128, 32)
    windows = read(QWEN3, **SLIDES).windows
    assert windows == (None,) * 20 + (4096,) * 8


def test_mistral() -> None:
    model = read(MISTRAL)
    assert (model.architecture, model.head_dim, model.windows) == ("mistral", 128, (4096,) * 32)
    assert read(MISTRAL, head_dim=64).head_dim == 64
    full = read(MISTRAL, sliding_window=None)
    assert full.windows == (None,) * 32
    assert read(MISTRAL, sliding_window=32768) == full  # as wide as the context
    absent = {key: MISTRAL[key] for key in MISTRAL if key not in ("sliding_window", "head_dim")}
    del absent["num_key_value_heads"], absent["max_position_embeddings"]
    assert read(absent) == replace(model, seq_length=131072)


LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"type": "dynamic", "factor": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@each(
    ("raw", "expected"),
    [
        (None, None),
        ({}, None),
        ({"rope_type": "default"}, None),
        (LINEAR, RopeScaling("linear", 2.0, 131072)),
        (DYNAMIC, RopeScaling("dynamic", 4.0, 131072)),
        (LLAMA3, RopeScaling("llama3", 8.0, 8192)),
        (YARN, RopeScaling("yarn", 4.0, 32768)),
        ({"type": "yarn", "factor": 2.0}, RopeScaling("yarn", 2.0, 131072)),
        (YARN | {"factor": None}, RopeScaling("yarn", 4.0, 32768)),
        (
            YARN
            | {
                "beta_fast": 16,
                "beta_slow": 2,
                "attention_factor": 0.5,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "truncate": False,
            },
            RopeScaling("yarn", 4.0, 32768, 1.0, 4.0, 16.0, 2.0, 0.5, 1.0, 0.8, False),
        ),
    ],
)
def test_rope_scaling_of_both_transformers(
    raw: dict[str, Any] | None, expected: RopeScaling | None
) -> None:
    four = read(LLAMA, rope_scaling=raw)
    assert four.rotary == Rotary(500000.0, expected)
    new = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    five = read(new, rope_parameters=(raw or {}) | {"rope_theta": 500000.0})
    assert five == four


def test_default_theta() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert read(raw).rotary.theta == 10000.0
    assert read(raw, rope_parameters={"rope_type": "default"}).rotary.theta == 10000.0


def test_an_empty_old_scaling_does_not_hide_the_new() -> None:
    new = {"rope_theta": 2e6, "rope_type": "linear", "factor": 2.0}
    config = read(LLAMA, rope_theta=None, rope_scaling={}, rope_parameters=new)
    assert config.rotary == Rotary(2e6, RopeScaling("linear", 2.0, 131072))


def test_dynamic_scaling_extends_the_context() -> None:
    config = read(LLAMA, max_position_embeddings=2048, rope_scaling=DYNAMIC)
    assert config.seq_length == 8192
    assert config.rotary.scaling == RopeScaling("dynamic", 4.0, 2048)
    assert read(LLAMA, max_position_embeddings=2048, rope_scaling=LINEAR).seq_length == 2048


def test_trained_length_beside_the_scaling_wins() -> None:
    config = read(LLAMA, rope_scaling=YARN, original_max_position_embeddings=4096)
    assert config.rotary.scaling == RopeScaling("yarn", 4.0, 4096)


SLIDES = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
KINDS = ["full_attention", "sliding_attention"] * 12

REFUSED = [
    (LLAMA, {"model_type": "mamba"}, "model_type is 'mamba', expected one of bloom, llama, qwen2"),
    (LLAMA, {"model_type": ["llama"]}, r"model_type is \['llama'\]"),
    (LLAMA, {"model_type": None}, "model_type is None"),
    (LLAMA, {"attention_bias": 1}, "attention_bias is 1, expected true or false"),
    (LLAMA, {"mlp_bias": "yes"}, "mlp_bias is 'yes', expected true or false"),
    (LLAMA, {"hidden_act": "xielu"}, "hidden_act is 'xielu', expected silu or swish or gelu"),
    (LLAMA, {"quantization_config": {"bits": 4}}, r"packed: .* \(4 bits\) is not read yet"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (LLAMA, {"hidden_size": "4096"}, "hidden_size is '4096', expected an integer"),
    (LLAMA, {"hidden_size": True}, "hidden_size is True"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size is 4096.0"),
    (LLAMA, {"hidden_size": None}, "hidden_size is None"),
    (LLAMA, {"hidden_size": 4100}, "a multiple of the 32 heads"),
    (LLAMA, {"num_hidden_layers": 10**9}, "an integer from 1 to 4,096"),
    (LLAMA, {"num_hidden_layers": 0}, "an integer from 1"),
    (LLAMA, {"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    (LLAMA, {"num_key_value_heads": 5}, "a divisor of the 32 heads"),
    (LLAMA, {"head_dim": 63}, "head_dim is 63, expected an even number"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    (LLAMA, {"rms_norm_eps": 0}, "a number above 0"),
    (LLAMA, {"rope_theta": float("inf")}, "rope_theta is inf"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
    (LLAMA, {"eos_token_id": [1, "2"]}, "eos_token_id is '2'"),
    (LLAMA, {"eos_token_id": 128256}, "a token id from 0 to 128255"),
    (LLAMA, {"bos_token_id": [1]}, r"bos_token_id is \[1\]"),
    (LLAMA, {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
    (LLAMA, {"rope_scaling": [1]}, r"rope_scaling is \[1\], expected an object"),
    (LLAMA, {"rope_scaling": {"rope_type": "proportional"}}, "'proportional', expected default"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "short_factor is None, expected a list"),
    (LLAMA, {"rope_scaling": {"rope_type": {}}}, "rope_scaling is"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None"),
    (LLAMA, {"rope_scaling": LINEAR | {"factor": 0.5}}, "a number from 1 to 1024"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "low_freq_factor = 1.0 or more"),
    (LLAMA, {"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no'"),
    (LLAMA, {"rope_parameters": {"full_attention": LINEAR}}, "the same for all layers"),
    (QWEN2, {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'"),
    (QWEN2, SLIDES | {"sliding_window": 0}, "sliding_window is 0, expected an integer from 1"),
    (QWEN2, SLIDES | {"sliding_window": "9"}, "sliding_window is '9'"),
    (QWEN2, SLIDES | {"max_window_layers": -1}, "max_window_layers is -1, expected an integer"),
    (QWEN2, SLIDES | {"max_window_layers": None}, "max_window_layers is None"),
    (QWEN2, SLIDES | {"layer_types": KINDS[1:]}, r"layer_types is \[.*, expected a list of 24"),
    (QWEN2, SLIDES | {"layer_types": "sliding_attention"}, "layer_types is 'sliding_attention'"),
    (
        QWEN2,
        SLIDES | {"layer_types": [*KINDS[1:], "chunked_attention"]},
        "layer_types is 'chunked_attention', .* each full_attention or sliding_attention",
    ),
    (QWEN2, {"layer_types": KINDS}, "'sliding_attention', .* each full_attention: no window"),
    (QWEN2, SLIDES | {"sliding_window": None, "layer_types": KINDS}, ": no window"),
    (QWEN3, {"head_dim": 127}, "head_dim is 127, expected an even number"),
    (QWEN3, {"head_dim": "128"}, "head_dim is '128', expected an integer"),
    (QWEN3, {"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
    (QWEN3, {"hidden_act": "xielu"}, "hidden_act is 'xielu', expected silu or swish or gelu"),
    (QWEN3, {"num_key_value_heads": 3}, "a divisor of the 16 heads"),
    (QWEN3, {"layer_types": KINDS}, "layer_types is .* a list of 28"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window is 0, expected an integer from 1"),
    (MISTRAL, {"sliding_window": False}, "sliding_window is False"),
    (MISTRAL, {"head_dim": 3}, "head_dim is 3, expected an even number"),
    (MISTRAL, {"num_key_value_heads": 7}, "a divisor of the 32 heads"),
    (MISTRAL, {"hidden_act": "xielu"}, "hidden_act is 'xielu', expected silu or swish or gelu"),
    (BLOOM, {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact=true is not supported"),
    (BLOOM, {"n_inner": 100}, "n_inner is 100"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention=true"),
    (GPT2, {"activation_function": "silu"}, "activation_function is 'silu', expected gelu_new"),
]


def test_refused(subtests: pytest.Subtests) -> None:
    for raw, changes, expected in REFUSED:
        with subtests.test(changes=changes):
            with pytest.raises(ArtifactError, match=expected) as caught:
                read(raw, **changes)
            assert str(caught.value).startswith("config.json")
            assert caught.value.exit_code == 4


def test_a_sliding_window_that_never_slides() -> None:
    plain = read(QWEN2)
    assert read(QWEN2, use_sliding_window=True, max_window_layers=24) == plain
    assert read(QWEN2, use_sliding_window=True, max_window_layers=0) == plain  # wide as the context
    assert read(QWEN2, **SLIDES | {"sliding_window": None}) == plain
    kinds = ["full_attention"] * 24
    assert read(QWEN2, use_sliding_window=True, sliding_window=9, layer_types=kinds) == plain


def test_layers_have_windows_from_max_window_layers_on() -> None:
    assert read(QWEN2, **SLIDES).windows == (None,) * 20 + (4096,) * 4
    by_kind = ["full_attention"] * 20 + ["sliding_attention"] * 4
    changes = SLIDES | {"max_window_layers": 7, "layer_types": by_kind}
    assert read(QWEN2, **changes) == read(QWEN2, **SLIDES)
    assert read(QWEN2, **SLIDES, layer_types=KINDS).windows == (None, 4096) * 12
    absent = {key: value for key, value in QWEN2.items() if "window" not in key}
    assert read(absent, use_sliding_window=True, num_hidden_layers=30).windows[27:] == (
        *(None, 4096, 4096),
    )


def test_biases_of_llama() -> None:
    attention = read(LLAMA, attention_bias=True)
    assert (attention.attention.qkv_bias, attention.attention.out_bias) == (True, True)
    assert attention.architecture == "llama" and not attention.feed_forward.bias
    assert read(LLAMA, mlp_bias=True).feed_forward.bias
    assert read(LLAMA, attention_bias=None, mlp_bias=None) == read(LLAMA)


@each(
    "config",
    [
        read(BLOOM),
        read(GPT2, n_inner=1000),
        read(QWEN2),
        read(QWEN2, **SLIDES),
        read(QWEN2, **SLIDES, layer_types=KINDS),
        read(QWEN3),
        read(QWEN3, attention_bias=True, tie_word_embeddings=False, rope_scaling=YARN),
        read(QWEN3, **SLIDES),
        read(MISTRAL),
        read(MISTRAL, sliding_window=None, head_dim=64),
        read(LLAMA),
        read(LLAMA, attention_bias=True),
        read(LLAMA, mlp_bias=True),
        *(read(LLAMA, rope_scaling=raw, head_dim=64) for raw in (LINEAR, DYNAMIC, LLAMA3, YARN)),
        read(LLAMA, rope_scaling=YARN | {"mscale": 2.0, "mscale_all_dim": 1.0, "truncate": False}),
        replace(read(LLAMA), eos_token_id=(), bos_token_id=None),
    ],
)
def test_written_config_reads_back(config: Decoder) -> None:
    raw = json.loads(json.dumps(hf_from_model_config(config)))
    assert model_config_from_hf(raw, "config.json") == config


def test_models_without_a_config_json_are_not_written() -> None:
    """A yaml may ask for blocks that no architecture of transformers has."""
    model = read(MISTRAL | {"sliding_window": 8})
    full = replace(model.blocks[0], attention=replace(model.attention, window=None))
    mixed = replace(model, blocks=(full, *model.blocks[1:]))
    with pytest.raises(ConfigError, match="cannot express sliding_window="):
        hf_from_model_config(mixed)
    wide = read(BLOOM)
    width = replace(wide.feed_forward, width=3 * wide.hidden_size)
    wide = replace(wide, blocks=tuple(replace(one, feed_forward=width) for one in wide.blocks))
    with pytest.raises(ConfigError, match=r"bloom: .* cannot express intermediate_size=3072"):
        hf_from_model_config(wide)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    raw=st.sampled_from([LLAMA, QWEN2, QWEN3, MISTRAL, BLOOM, GPT2]),
    changes=st.dictionaries(
        st.sampled_from(
            sorted(
                {*LLAMA, *QWEN2, *QWEN3, *MISTRAL, *BLOOM, *GPT2, "rope_scaling", "rope_parameters"}
            )
        ),
        json_values,
        max_size=4,
    ),
    scaling=st.dictionaries(
        st.sampled_from([*YARN, *LLAMA3, "type", "beta_fast", "mscale"]),
        json_values | st.sampled_from(["yarn", "llama3", "linear", "dynamic"]),
        max_size=5,
    ),
)
def test_any_json_is_read_or_refused(
    raw: dict[str, Any], changes: dict[str, Any], scaling: dict[str, Any]
) -> None:
    try:
        config = model_config_from_hf(raw | {"rope_scaling": scaling} | changes, "config.json")
    except ArtifactError as error:
        assert error.exit_code == 4
    else:
        assert config.num_heads % config.n_kv_heads == 0


OLMO2 = {
    key: LLAMA[key] for key in LLAMA if key not in ("model_type", "head_dim", "rms_norm_eps")
} | {"model_type": "olmo2"}
GRANITE = LLAMA | {
    **{"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.015625},
    **{"residual_multiplier": 0.22, "logits_scaling": 49},
}
SMOLLM3 = LLAMA | {"model_type": "smollm3", "num_hidden_layers": 8}


def test_olmo2() -> None:
    model = read(OLMO2)
    block, attention = model.blocks[0], model.attention
    assert (model.architecture, block.norm, block.post_norm) == ("olmo2", None, Norm("rms", 1e-5))
    assert attention.qk_norm == Norm("rms", 1e-5) and not attention.qk_norm_by_head
    assert not (attention.qkv_bias or attention.out_bias)
    biased = read(OLMO2, attention_bias=True).attention
    assert (biased.qkv_bias, biased.out_bias) == (True, True)


def test_granite() -> None:
    model = read(GRANITE)
    assert (model.embedding_scale, model.attention.scale) == (12.0, 0.015625)
    assert (model.blocks[-1].residual_scale, model.logits_scaling) == (0.22, 49.0)
    plain = read(LLAMA, model_type="granite")  # where nothing is given, all of them are 1
    assert (plain.embedding_scale, plain.attention.scale) == (1.0, 1.0)
    assert (plain.blocks[0].residual_scale, plain.logits_scaling) == (1.0, 1.0)
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        with pytest.raises(ArtifactError, match=rf"{key} is 0, expected a number above 0"):
            read(GRANITE, **{key: 0})


def rotates(model: Decoder) -> list[bool]:
    return [block.attention.rotary is not None for block in model.blocks]


def test_smollm3() -> None:
    model = read(SMOLLM3, rope_theta=None)
    assert rotates(model) == [True, True, True, False] * 2 and set(model.windows) == {None}
    assert model.tie_word_embeddings and read(SMOLLM3, rope_theta=5e6).rotary == Rotary(5e6)
    without = {key: value for key, value in SMOLLM3.items() if key != "rope_theta"}
    assert read(without).rotary == Rotary(2e6)
    assert rotates(read(SMOLLM3, no_rope_layer_interval=2)) == [True, False] * 4
    listed = read(SMOLLM3, no_rope_layers=[0, 1, 1, 1, 1, 1, 1, 1])
    assert rotates(listed) == [False] + [True] * 7 and listed.rotary is not None
    slides = {"use_sliding_window": True, "sliding_window": 512}
    assert read(SMOLLM3, **slides).windows == (None, None, None, 512) * 2
    for wrong in ([1] * 7, [2] * 8, [True] * 8, "1"):
        with pytest.raises(ArtifactError, match=r"no_rope_layers is .*, expected a list of 8"):
            read(SMOLLM3, no_rope_layers=wrong)


def test_sizes_without_a_field_are_not_lost() -> None:
    multiplied = replace(read(LLAMA), embedding_scale=2.0)
    with pytest.raises(ConfigError, match=r"cannot express embedding_multiplier=2\.0"):
        hf_from_model_config(multiplied)


GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    **{"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "sliding_window": 32, "query_pre_attn_scalar": 25},
}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "num_hidden_layers": 7}


def test_gemma2() -> None:
    model = read(GEMMA2)
    block, attention, norm = model.blocks[0], model.attention, Norm("rms", 1e-6)
    assert (block.norm, block.post_norm, attention.qk_norm) == (norm, norm, None)
    assert (attention.scale, attention.softcap, model.logits_softcap) == (0.2, 50.0, 30.0)
    assert (block.feed_forward.function, model.embedding_scale) == ("gelu", 8.0)
    assert model.windows == (32, None, 32, None) and model.tie_word_embeddings
    assert (model.bos_token_id, model.eos_token_id, model.pad_token_id) == (2, (1,), 0)
    plain = read(
        GEMMA2,
        **{"attn_logit_softcapping": None, "final_logit_softcapping": None},
        **{"query_pre_attn_scalar": 16, "layer_types": ["full_attention"] * 4},
    )
    assert (plain.attention.softcap, plain.logits_softcap, plain.attention.scale) == (None,) * 3
    assert set(plain.windows) == {None}
    with pytest.raises(ArtifactError, match="use_bidirectional_attention=true is not supported"):
        read(GEMMA2, use_bidirectional_attention=True)


def test_gemma3() -> None:
    model = read(GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert model.windows == (32,) * 5 + (None, 32)
    whole, local = Rotary(1e6, RopeScaling("linear", 8.0, 128)), Rotary(1e4)
    assert (model.rotary, model.rotaries) == (whole, (local, whole))
    assert model.attention.qk_norm == Norm("rms", 1e-6) and model.attention.qk_norm_by_head
    assert (model.attention.softcap, model.logits_softcap) == (None, None)
    nested = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None}
    assert read(GEMMA3, rope_parameters=nested) == model
    # A window of the whole context still tells which layers have the local positions.
    assert read(GEMMA3, sliding_window=4096).rotaries == (local, Rotary(1e6))
    for wrong in ({"rope_theta": 5.0}, {"full_attention": 1}, [1]):
        with pytest.raises(ArtifactError, match=r"(rope_par|full_att).* is .*, expected an object"):
            read(GEMMA3, rope_parameters=wrong)
    with pytest.raises(ArtifactError, match=r"rope_scaling is .*, expected null with"):
        read(GEMMA3, rope_parameters=nested, rope_scaling={"rope_type": "linear", "factor": 2.0})
    scaled = {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ArtifactError, match="rope_type is 'linear', expected default"):
        read(GEMMA3, rope_parameters=scaled)
    with pytest.raises(ArtifactError, match="attn_logit_softcapping is 50, expected null"):
        read(GEMMA3, attn_logit_softcapping=50)


def test_the_text_model_of_a_gemma3_with_a_vision_tower_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = {key: value for key, value in GEMMA3.items() if key != "vocab_size"}
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    model = read(outer)
    assert (model.architecture, model.vocab_size) == ("gemma3_text", 262208)
    assert model.eos_token_id == (1, 106)
    assert "only its text model is read" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match="text_config is None, expected an object"):
        read({"model_type": "gemma3"})


@pytest.mark.parametrize(
    "raw", [OLMO2, GRANITE, SMOLLM3, GEMMA2, GEMMA3], ids=lambda raw: str(raw["model_type"])
)
def test_a_written_config_json_reads_back(raw: dict[str, Any]) -> None:
    model = read(raw)
    assert model_config_from_hf(hf_from_model_config(model), "config.json") == model
