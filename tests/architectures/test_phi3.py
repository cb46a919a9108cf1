"""LongRoPE in the forms that config.json files have it in."""

from __future__ import annotations

from typing import Any

import pytest

from lite_runner.architectures.spec import Decoder, RopeScaling, Rotary
from lite_runner.errors import ArtifactError
from lite_runner.weights.formats import model_config_from_hf


def read(raw: dict[str, Any], **changes: Any) -> Decoder:
    return model_config_from_hf(raw | changes, "config.json")


def test_longrope_of_published_files() -> None:
    short, long = [1.0] * 7 + [1.5], [float(place) for place in range(1, 9)]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 64, "eos_token_id": 2}
    phi3 = {"model_type": "phi3", "max_position_embeddings": 8192, **sizes}
    phi3 |= {"bos_token_id": 1, "pad_token_id": 2}
    lists = {"short_factor": short, "long_factor": long}
    expected = RopeScaling("longrope", 2.0, 4096, short_factor=(*short,), long_factor=(*long,))
    for name in ("su", "yarn", "longrope"):
        assert read(phi3, rope_scaling={"type": name, **lists}).rotary == Rotary(1e4, expected)
    new = {"rope_type": "longrope", "rope_theta": 1e4, "attention_factor": 1.5, **lists}
    model = read(phi3, rope_parameters=new, original_max_position_embeddings=512)
    assert model.rotary is not None and model.rotary.scaling is not None
    assert (model.rotary.scaling.factor, model.rotary.scaling.attention_factor) == (16.0, 1.5)
    assert model.length_dependent and not read(phi3).length_dependent
    assert (model.short_length, read(phi3).short_length) == (512, None) and model.keys_reusable
    half = {name: values[:4] for name, values in lists.items()}
    part = read(phi3, rope_scaling={"type": "longrope", **half}, partial_rotary_factor=0.5)
    assert part.rotary is not None and part.rotary.dims == 8
    # A window that is longer than all texts is none.
    assert read(phi3, sliding_window=8192) == read(phi3) != read(phi3, sliding_window=2047)
    for wrong, message in (
        ({"type": "longrope", **half}, "expected a list of 8 numbers above 0"),
        ({"type": "longrope", **lists, "short_factor": [0.0] * 8}, "short_factor is .*, expected"),
        ({"type": "longrope", **lists, "short_mscale": 1.1}, "short_mscale=1.1 is not supported"),
        ({"type": "linear", "factor": 2.0}, "'linear', expected default or longrope"),
    ):
        with pytest.raises(ArtifactError, match=message):
            read(phi3, rope_scaling=wrong)
