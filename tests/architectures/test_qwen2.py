from __future__ import annotations

from typing import Any

import pytest

from tests.weights.formats.test_init import QWEN2, QWEN3, read

QWEN2_VL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 32},
    "vision_start_token_id": 151652,
    "image_token_id": 151655,
}
MROPE = {"type": "mrope", "mrope_section": [16, 24, 24]}


def test_the_text_model_of_a_multimodal_model_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    """Its positions of three kinds are the same in a text; the first files have no text_config."""
    expected = read(QWEN2)
    flat = QWEN2 | QWEN2_VL | {"rope_scaling": MROPE}
    nested = QWEN2_VL | {"text_config": flat | {"model_type": "qwen2_5_vl_text"}}
    for raw in (flat, nested, nested | {"model_type": "qwen2_vl"}):
        assert read(raw) == expected
    stderr = capsys.readouterr().err
    assert "only its text model is read" in stderr and "mrope" not in stderr
    rope = {"rope_type": "default", "rope_theta": 1000000, "mrope_section": [1], "x": 1}
    outer = {"model_type": "qwen3_vl", "text_config": QWEN3 | {"rope_parameters": rope}}
    assert read(outer) == read(QWEN3)
