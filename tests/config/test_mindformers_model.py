from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    for old, new in (
        ("apply_query_key_layer_scaling: True", "apply_query_key_layer_scaling: False"),
        ("add_bias_linear: False", "add_bias_linear: True"),
        ("rmsnorm: True", "rmsnorm: False"),
        ("post_layer_norm: True", "post_layer_norm: False"),
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
