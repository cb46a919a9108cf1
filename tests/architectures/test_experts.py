"""Mixtures of experts in config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lite_runner.architectures.spec import Decoder, Experts, FeedForward
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.weights.formats import hf_from_model_config, model_config_from_hf

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    **{"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072},
    **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
}


def read(raw: dict[str, Any], **changes: Any) -> Decoder:
    return model_config_from_hf(raw | changes, "config.json")


def test_qwen3_moe() -> None:
    model = read(QWEN3_MOE)
    assert model.sparse == FeedForward(768, gated=True, bias=False, experts=Experts(128, 8))
    assert model.dense_layers == () and model.attention.qk_norm is not None
    assert read(QWEN3_MOE, decoder_sparse_step=3).dense_layers[:5] == (0, 1, 3, 4, 6)
    some = read(QWEN3_MOE, mlp_only_layers=[0, 27, 99])
    assert some.dense_layers == (0, 27) and some.feed_forward.width == 3072
    without = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
    assert read(without).sparse == replace(model.sparse, experts=Experts(128, 8, False))
    with pytest.raises(ArtifactError, match="num_experts_per_tok is 129, expected at most the 128"):
        read(QWEN3_MOE, num_experts_per_tok=129)
    for wrong in ("0", [-1], [True]):
        with pytest.raises(ArtifactError, match=r"mlp_only_layers is .*, expected a list of"):
            read(QWEN3_MOE, mlp_only_layers=wrong)


def test_mixtral() -> None:
    model = read(MIXTRAL)
    assert model.sparse == FeedForward(14336, gated=True, bias=False, experts=Experts(8, 2))
    assert set(model.windows) == {None} and set(read(MIXTRAL, sliding_window=9).windows) == {9}


@pytest.mark.parametrize("raw", [QWEN3_MOE, MIXTRAL, QWEN3_MOE | {"mlp_only_layers": [1]}])
def test_mixtures_that_are_written_read_back(raw: dict[str, Any]) -> None:
    model = read(raw)
    assert model_config_from_hf(hf_from_model_config(model), "config.json") == model


def test_experts_that_a_config_json_has_no_field_for_are_not_lost() -> None:
    sizes = {"vocab_size": 90, "hidden_size": 16, "ffn_hidden_size": 32, "num_key_value_heads": 1}
    plain = read({"model_type": "telechat", "n_layer": 1, "n_head": 2, **sizes})
    width = replace(plain.feed_forward, experts=Experts(4, 2))
    mixture = replace(plain, blocks=(replace(plain.blocks[0], feed_forward=width),))
    with pytest.raises(ConfigError, match=r"telechat: .* cannot express .*num_experts=4"):
        hf_from_model_config(mixture)
