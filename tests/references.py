"""Names of the tiny models of tests/fixtures/reference."""

from __future__ import annotations

from pathlib import Path

REFERENCE = Path(__file__).resolve().parent / "fixtures/reference"
# Only what transformers gives for these is here: they are read as no model yet, or refused.
NOT_COMPUTED = (
    "llama_biases",
    "mistral",
    "mistral_long",
    "qwen2_window",
    "qwen3",
    "qwen3_tied",
)


def computed() -> list[str]:
    """The models that every way to run is held to."""
    return [name for name in every() if name not in NOT_COMPUTED]


def every() -> list[str]:
    """All of them: what our own operators and the NumPy network are held to."""
    return sorted(path.parent.name for path in REFERENCE.glob("*/model.safetensors"))
