"""The reference network, which defines the meaning of descriptions, against transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lite_runner.architectures.reference import forward
from lite_runner.weights.checkpoint import model_config_of, open_checkpoint
from tests.each import each
from tests.models import reference_model
from tests.references import REFERENCE

CASES = sorted(path.parent.name for path in REFERENCE.glob("*/model.safetensors"))


WINDOWS = {"llama": None, "mistral": 8, "qwen2_window": (None, 8, 8)}


@each("case", CASES)
def test_logits_equal_transformers(case: str, relative_error: Callable[..., float]) -> None:
    model = model_config_of(REFERENCE / case)
    tensors = {
        name: one.float32() for name, one in open_checkpoint(REFERENCE / case, model).items()
    }
    expected = np.load(REFERENCE / case / "expected.npz")
    worst = 0.0
    for prompt, length, forced, logits in zip(
        *(expected[name] for name in ("prompts", "lengths", "continuations")),
        expected["logits_no_cache" if "logits_no_cache" in expected else "logits"],
        strict=True,
    ):
        tokens = np.concatenate([prompt[:length], forced])
        found = forward(model, tensors, tokens)[length - 1 :]
        if "logits_no_cache" in expected:  # positions follow from the length of the whole
            steps = range(len(forced) + 1)
            found = [forward(model, tensors, tokens[: length + step])[-1] for step in steps]
        worst = max(worst, relative_error(np.stack(found), logits))
    assert worst <= 5e-6


def test_dynamic_scaling_extends_the_context() -> None:
    model = reference_model("llama_rope_dynamic")
    assert model.seq_length == 3 * 16


def test_windows_are_told_once_where_all_layers_have_the_same() -> None:
    windows = {case: reference_model(case).sizes()["sliding_window"] for case in WINDOWS}
    assert windows == WINDOWS
