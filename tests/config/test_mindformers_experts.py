"""A MindFormers yaml of a Llama with experts, which is a Mixtral."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.architectures.spec import Experts
from lite_runner.config.schema import RunConfig

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
    (said,) = (note for note in notes(*written()) if note.startswith("no effect"))
    assert "moe_config (aux_loss_factor, capacity_factor, enable_sdrop)" in said
    # In the section of the model, as newer releases have it, and over that of the whole file.
    inner = EXPERTS.replace("\n", "\n    ").rstrip()
    text = MIXTRAL.replace("    seq_length", f"    moe_config:{inner}\n    seq_length")
    assert resolve(*written(text=f"{text}moe_config: {{expert_num: 1}}\n")).model_config() == model


@pytest.mark.parametrize(
    ("old", "new", "said"),
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
def test_what_is_no_mixtral_is_refused(
    old: str, new: str, said: str, faults: Callable[..., str], written: Callable[..., tuple]
) -> None:
    assert said in faults(*written(old, new))
