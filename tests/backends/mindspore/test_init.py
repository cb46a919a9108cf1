"""Memory estimates of MindSpore's operators; tests/system/test_peaks.py compares them with what
runs took."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.backends import mindspore as module
from lite_runner.system import environment
from tests.backends.shared import hints_of, need_of

HALF = "model.model_config.compute_dtype=float16"
MS = "backend=ms"
Dry = Callable[..., str]


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ([HALF, MS], "538.1 MB as float32"),
        ([HALF, "model.model_config.use_past=false"], "538.1 MB as float32"),
        (
            [HALF, MS, "use_parallel=true", "parallel_config.model_parallel=3"],
            "179.4 MB as float32 in each rank",
        ),
        (["quant=a16w4", MS], "538.1 MB as float32"),
        (["quant=a16w8", "context.device_target=Ascend"], "as integers (quant=a16w8)"),
    ],
)
def test_weights_are_counted_by_their_size_in_memory(
    settings: list[str], held: str, dry: Dry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 0)
    base = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=[x,y]"]
    assert held in dry(*base, *settings)


def test_logits_of_prompts_are_counted() -> None:
    row = 3 * 4 * 49152
    assert need_of(MS, "prompt_logprobs=0").work - need_of(MS).work == (256 - 2) * row


def test_workspace_grows_with_steps() -> None:
    assert need_of(MS, "max_length=4096").work > need_of(MS, "max_length=256").work


def test_layers_of_one_kind_take_less_than_those_of_a_users_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of SmolLM2's 30 layers each is compiled there, since a user's network may change it."""
    shared = need_of(MS).work
    monkeypatch.setattr(module, "custom_network", lambda model: object())
    assert need_of(MS).work - shared == 29 * module._KIND


def test_levers_are_those_that_help() -> None:
    assert not hints_of(MS)  # it computes in float32 alone
    assert "predict_batch_size=1" in hints_of(MS, "max_length=8192")


def test_a_plan_for_a_device_that_is_not_here(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 0)
    ascend = ["context.device_target=Ascend", "model=llama2_7b", "predict_data=hi"]
    text = dry(*ascend)
    assert "13.5 GB as float16" in text
    assert "needs 13.7 GB on each device; how much one has is not known here" in text
    assert "3.4 GB as float16 in each rank" in dry(*ascend, "parallel=tp4")
    scored = dry(*ascend[:2], "run_mode=eval", f"eval_data={Path(__file__)}")
    assert "needs 13.7 GB on each device" in scored
    export = dry(*ascend[:2], "run_mode=export")
    assert "static_pair" in export and "free" in export  # the graphs are written here
    assert main(ascend) == 3  # what is to be run wants one
