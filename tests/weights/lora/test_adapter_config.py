"""adapter_config.json: any text is a LoRA config or an ArtifactError, and peft's words mean what
they mean there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from lite_runner.errors import ArtifactError
from lite_runner.weights.lora.adapter_config import read_settings

KEYS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "bias"),
    *("layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "peft_type", "use_dora"),
)
SCALARS = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=9)
VALUES = SCALARS | some.lists(SCALARS, max_size=3) | some.dictionaries(some.text(), SCALARS)
PLAIN = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
MODULES = [f"model.layers.{i}.self_attn.{n}" for i in range(12) for n in ("q_proj", "v_proj")]


@given(some.dictionaries(some.sampled_from(KEYS), VALUES))
def test_any_object_is_a_config_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("adapter")
    (folder / "config.json").write_text(json.dumps(PLAIN | content))
    try:
        settings = read_settings(folder)
        settings.targets(MODULES, "lm_head")
    except ArtifactError:
        return
    assert settings.r >= 1 and settings.rank(MODULES[0]) >= 1


def targeted(tmp_path: Path, **content: object) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | content))
    found = read_settings(tmp_path).targets([*MODULES, "lm_head"], "lm_head")
    return [name.removeprefix("model.layers.") for name in [*MODULES, "lm_head"] if name in found]


def test_target_modules(tmp_path: Path) -> None:
    assert len(targeted(tmp_path)) == 12
    assert len(targeted(tmp_path, target_modules="all-linear")) == 24  # not the head
    assert targeted(tmp_path, target_modules=["1.self_attn.q_proj"]) == ["1.self_attn.q_proj"]
    assert targeted(tmp_path, target_modules=r".*\.1\d\..*v_proj") == [
        *("10.self_attn.v_proj", "11.self_attn.v_proj")
    ]
    one = ["1.self_attn.q_proj"]
    assert targeted(tmp_path, layers_to_transform=1) == one
    assert targeted(tmp_path, layers_to_transform=[1], layers_pattern="layers") == one
    assert targeted(tmp_path, layers_to_transform=[1], exclude_modules=["lm_head"]) == one
    others = r".*\.[02-9]\..*|.*\.1\d\..*"
    assert targeted(tmp_path, exclude_modules=others) == one


def test_the_first_pattern_that_fits_the_end_of_a_name_wins(tmp_path: Path) -> None:
    patterns = {"proj": 9, "1.self_attn.q_proj": 2, "q_proj": 3, r"layers\.\d+\.self_attn\..*": 5}
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"rank_pattern": patterns}))
    settings = read_settings(tmp_path)
    ranks = [settings.rank(f"model.layers.{name}") for name in ("1.self_attn.q_proj", "0.mlp.up")]
    assert ranks == [2, 4]
    assert settings.rank("model.layers.11.self_attn.q_proj") == 3  # not the end of layer 11's name
    assert settings.rank("model.layers.2.self_attn.v_proj") == 5


SEVEN = ".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj"


@pytest.mark.parametrize("pattern", [SEVEN, f".*layers.*({SEVEN})", r".*[*+?|()].*", "(a|b)?.*q"])
def test_alternatives_do_not_make_a_pattern_slow(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"target_modules": pattern}))
    assert read_settings(tmp_path).target_modules == pattern


@pytest.mark.parametrize(
    "pattern", [".*" * 7, "(.*|a)" * 7, ".?" * 30, "(.*)*x", "(x|" + ".+" * 7 + ")"]
)
def test_a_pattern_that_may_take_long_is_refused(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"target_modules": pattern}))
    with pytest.raises(ArtifactError, match="repeats in a row"):
        read_settings(tmp_path)
