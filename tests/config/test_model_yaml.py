"""The yaml beside exported graphs: what is written of a model reads as that model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.architectures.spec import Decoder
from lite_runner.config.model_yaml import is_ours, model_yaml
from lite_runner.config.schema import RunConfig
from lite_runner.weights.checkpoint import model_config_of
from tests.references import REFERENCE

# MindFormers has a whole ratio of widths, so no word for the last.
CASES = sorted(
    {path.parent.name for path in REFERENCE.glob("*/model.safetensors")} - {"gpt2_inner"}
)

BASES = {
    "bloom": "bloom_560m",
    "gpt2": "gpt2",
    "qwen2": "qwen2_7b",
    "qwen3": "qwen3_8b",
    "mistral": "mistral_7b",
    "olmo2": "olmo2_1b",
    "granite": "granite3.1_2b",
    "chatglm_6b": "glm_6b",
    "smollm3": "smollm3_3b",
    "glm": "glm4_9b_hf",
    "glm4": "glm4_9b_0414",
    "chatglm": "glm2_6b",
    "gemma2": "gemma2_2b",
    "gemma3_text": "gemma3_1b",
    "qwen3_moe": "qwen3_30b_a3b",
    "mixtral": "mixtral_8x7b",
    "phi3": "phi4",
    "starcoder2": "starcoder2_3b",
    "gpt_neox": "pythia_160m",
    "llama": "mistral_7b",  # whose window is not the model's
}


def alternating() -> Decoder:
    """A Qwen3 in which every other layer has a window, with biases."""
    model = model_config_of(REFERENCE / "qwen3_tied")
    window = replace(model.blocks[0], attention=replace(model.attention, window=8))
    return replace(model, blocks=(model.blocks[0], window, model.blocks[2]))


@pytest.mark.parametrize("case", [*CASES, "alternating"])
def test_reads_back(case: str, resolve: Callable[..., RunConfig], tmp_path: Path) -> None:
    model = alternating() if case == "alternating" else model_config_of(REFERENCE / case)
    # The yaml is laid over the model that it names, as it is written for that one.
    named = BASES[model.architecture]
    config = resolve(f"model={named}", "predict_data=hi")
    path = tmp_path / "model.yaml"
    path.write_text(model_yaml(model, config, 32, "mindir_lite"), encoding="utf-8")
    assert is_ours(path)
    found = resolve("--config", str(path), "predict_data=hi", "load_checkpoint=random")
    assert found.model_config() == model
