from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.architectures.spec import Experts
from lite_runner.config.schema import RunConfig

Resolve, Faults = Callable[..., RunConfig], Callable[..., str]
# As the released files for prediction have it, but for what other sections say.
GLM2 = """\
model:
  model_config:
    type: ChatGLM2Config
    num_layers: 28
    padded_vocab_size: 65024
    hidden_size: 4096
    ffn_hidden_size: 13696
    kv_channels: 128
    num_attention_heads: 32
    seq_length: 193
    hidden_dropout: 0.0
    attention_dropout: 0.0
    layernorm_epsilon: 1e-5
    rmsnorm: True
    apply_residual_connection_post_layernorm: False
    post_layer_norm: True
    add_bias_linear: False
    add_qkv_bias: True
    bias_dropout_fusion: True
    multi_query_attention: True
    multi_query_group_num: 2
    apply_query_key_layer_scaling: True
    attention_softmax_in_fp32: True
    fp32_residual_connection: False
    quantization_bit: 0
    pre_seq_len: None
    prefix_projection: False
    eos_token_id: 2
    pad_token_id: 0
    gmask_token_id: None
    max_length: 256
    checkpoint_name_or_path: glm3_6b
  arch: {type: ChatGLM2ForConditionalGeneration}
trainer: {type: CausalLanguageModelingTrainer, model_name: glm3_6b}
processor:
  tokenizer: {type: ChatGLM3Tokenizer, end_token: </s>, gmask_token: '[gMASK]'}
  type: GLMProcessor
"""


def test_chatglm(resolve: Resolve, faults: Faults, tmp_path: Path) -> None:
    path = tmp_path / "glm.yaml"

    def written(old: str = "", new: str = "") -> tuple[str, ...]:
        path.write_text(GLM2.replace(old, new, 1), encoding="utf-8")
        return ("--config", str(path), "--predict_data", "hi")

    config = resolve(*written())
    model = config.model_config()
    assert model is not None and model.architecture == "chatglm"
    assert (model.n_kv_heads, model.head_dim, model.seq_length) == (2, 128, 193)
    assert model.rotary is not None and (model.rotary.theta, model.rotary.dims) == (10000.0, 64)
    assert model.attention.qkv_bias and config.model.model_config.max_decode_length == 256
    assert config.processor.tokenizer.type == "ChatGLM3Tokenizer"
    plain = resolve(*written("add_qkv_bias: True", "add_qkv_bias: False")).model_config()
    assert plain is not None and not plain.attention.qkv_bias
    biased = resolve(*written("add_bias_linear: False", "add_bias_linear: True")).model_config()
    assert biased is not None and biased.attention.out_bias and biased.feed_forward.bias
    centred = resolve(*written("rmsnorm: True", "rmsnorm: False")).model_config()
    assert centred is not None and centred.norm is not None and centred.norm.kind == "layer"
    bare = resolve(*written("post_layer_norm: True", "post_layer_norm: False")).model_config()
    assert bare is not None and bare.norm is None and bare.blocks[0].norm == model.norm
    for old, new in (
        ("apply_query_key_layer_scaling: True", "apply_query_key_layer_scaling: False"),
        ("pre_seq_len: None", "pre_seq_len: 128"),
        ("quantization_bit: 0", "quantization_bit: 8"),
        ("multi_query_group_num: 2", "multi_query_group_num: 32"),
        ("kv_channels: 128", "kv_channels: 126"),
    ):
        assert f"model_config.{old.partition(':')[0]}: " in faults(*written(old, new))


def test_the_mask_token_of_a_chatglm_6b_is_followed(resolve: Resolve, tmp_path: Path) -> None:
    """A ChatGLM2's yaml has the key too, where it means nothing: above."""
    path = tmp_path / "glm.yaml"
    path.write_text(
        "trainer: {model_name: glm_6b}\n"
        "model: {model_config: {type: GLMConfig, gmask_token_id: 7}, arch: {type: GLMChatModel}}\n",
        encoding="utf-8",
    )
    model = resolve("--config", str(path), "predict_data=hi").model_config()
    assert model is not None and model.prefix is not None
    assert model.prefix.mask_token_ids[0] == 7


EXPERTS = """
  expert_num: 6
  num_experts_chosen: 2
  routing_policy: "TopkRouterV2"
  capacity_factor: 1.1
  aux_loss_factor: 0.05
  enable_sdrop: True
"""
MIXTRAL = """
run_mode: predict
trainer: {type: CausalLanguageModelingTrainer, model_name: mixtral-8x7b}
model:
  model_config:
    type: LlamaConfig
    seq_length: 512
    hidden_size: 64
    intermediate_size: 96
    theta: 1000000
    num_layers: 2
    num_heads: 4
    n_kv_heads: 2
    vocab_size: 320
    rms_norm_eps: 1.0e-5
    checkpoint_name_or_path: ""
  arch: {type: LlamaForCausalLM}
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """`written(old, new)`: the arguments of a run of the yaml with the replacement."""

    def write(old: str = "", new: str = "", text: str = f"{MIXTRAL}moe_config:{EXPERTS}") -> tuple:
        assert old in text
        path = tmp_path / "mixtral.yaml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return ("--config", str(path), "predict_data=hi", "load_checkpoint=random")

    return write


def test_its_experts_are_those_of_a_mixtral(
    resolve: Callable[..., RunConfig],
    notes: Callable[..., list[str]],
    written: Callable[..., tuple],
) -> None:
    model = resolve(*written()).model_config()
    assert model is not None and model.architecture == "mixtral" and model.sparse is not None
    assert (model.sparse.experts, model.sparse.width) == (Experts(6, 2), 96)
    assert (model.num_layers, model.n_kv_heads, model.windows) == (2, 2, (None, None))
    (message,) = (note for note in notes(*written()) if note.startswith("no effect"))
    assert "moe_config (aux_loss_factor, capacity_factor, enable_sdrop)" in message
    # In the section of the model, as newer releases have it, and over that of the whole file.
    inner = EXPERTS.replace("\n", "\n    ").rstrip()
    text = MIXTRAL.replace("    seq_length", f"    moe_config:{inner}\n    seq_length")
    assert resolve(*written(text=f"{text}moe_config: {{expert_num: 1}}\n")).model_config() == model


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_experts_chosen: 2", "num_experts_chosen: 1", "chosen: got 1, expected 2 or more"),
        ("  num_experts_chosen: 2\n", "", "num_experts_chosen: got 1, expected 2 or more"),
        ("num_experts_chosen: 2", "num_experts_chosen: 7", "num_experts_per_tok: got 7"),
        ("expert_num: 6", "expert_num: x", "num_experts: got 'x'"),
        ("TopkRouterV2", "TopkRouterV1", "policy: got 'TopkRouterV1', expected 'TopkRouterV2'"),
        ('  routing_policy: "TopkRouterV2"\n', "", "routing_policy: got null"),
        ("enable_sdrop: True", "norm_topk_prob: False", "norm_topk_prob: got false"),
        ("enable_sdrop: True", "shared_expert_num: 2", "shared_expert_num: got 2, expected 0"),
        ("enable_sdrop: True", "use_gating_sigmoid: True", "use_gating_sigmoid: got true"),
        ("enable_sdrop: True", "topk_method: noaux_tc", "got 'noaux_tc', expected 'greedy'"),
        ("enable_sdrop: True", "moe_intermediate_size: 48", "got 48, expected the intermediate"),
        ("enable_sdrop: True", "expert_nums: 6", "moe_config.expert_nums: no such key"),
        ("LlamaForCausalLM", "BloomLMHeadModel", "moe_config.expert_num: 6 is not available"),
    ],
)
def test_experts_unlike_a_mixtral_are_refused(
    old: str, new: str, message: str, faults: Callable[..., str], written: Callable[..., tuple]
) -> None:
    assert message in faults(*written(old, new))


def test_the_weights_that_a_file_names(resolve: Resolve, tmp_path: Path) -> None:
    """A model's own name, and nothing, mean its published weights."""

    def source(name: str) -> str | None:
        key = "checkpoint_name_or_path: "
        text = GLM2.replace(f"{key}glm3_6b", f"{key}{name}")
        (tmp_path / "glm.yaml").write_text(text, encoding="utf-8")
        config = resolve("--config", str(tmp_path / "glm.yaml"), "--predict_data", "hi")
        return config.checkpoint_source

    published = resolve("model=glm3_6b", "predict_data=hi").checkpoint_source
    assert published and source("glm3_6b") == source("''") == published
    assert source("/there/x.ckpt") == "/there/x.ckpt"
