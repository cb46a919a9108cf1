"""What a config may say otherwise than its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ArtifactError
from lite_runner.model.consistency import check_same_model, quantization_of
from tests.models import model_named, reference_model

Configure = Callable[..., RunConfig]


def test_context_and_special_tokens_are_the_runs_to_choose() -> None:
    model = model_named("tiny_llama")
    check_same_model(replace(model, seq_length=7, eos_token_id=(5,)), model, Path("x"))
    with pytest.raises(ArtifactError, match=r"^x is another model than the config's: .*vocab_size"):
        check_same_model(model, reference_model("llama"), Path("x"))


def test_a_quantized_checkpoint_says_how(configure: Configure) -> None:
    line = ["model=tiny_llama", "load_checkpoint=random"]
    assert main(["run_mode=quantize", *line, "quant=a16w4", "quantize_output=q"]) == 0
    stored = quantization_of(configure("model=tiny_llama"), Path("q"))
    assert (stored.quant, stored.group) == ("a16w4", 32)
    same = configure("model=tiny_llama", "quant=a16w4", "context.kernels=true")
    assert quantization_of(same, Path("q")) == stored
    with pytest.raises(ArtifactError, match=r"leave quant= out, or give .*load_checkpoint=random"):
        quantization_of(configure("model=tiny_llama", "quant=a16w8"), Path("q"))
    Path("plain").mkdir()
    assert quantization_of(same, Path("plain")) == same.quantization
