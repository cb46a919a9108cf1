"""Keys of a MindFormers yaml that change results, or would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lite_runner.config.schema import RunConfig

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]
Line = Callable[..., list[str]]


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """`line(tokenizer, **settings)`: the command line of a llama2_7b's yaml with these."""

    def write(tokenizer: dict[str, Any] | None = None, **settings: Any) -> list[str]:
        raw = {
            "run_mode": "predict",
            "trainer": {"model_name": "llama2_7b"},
            "model": {
                "arch": {"type": "LlamaForCausalLM"},
                "model_config": {"type": "LlamaConfig", **settings},
            },
            "processor": {"tokenizer": tokenizer or {"type": "LlamaTokenizer"}},
        }
        path = tmp_path / "file.yaml"
        path.write_text(yaml.safe_dump(raw), encoding="utf-8")
        return ["--config", str(path), "predict_data=hi"]

    return write


EVERY = {"add_bos_token": False, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"type": "LlamaTokenizer", **EVERY, "add_prefix_space": True}, EVERY),
        (
            {"type": "GPT2Tokenizer", **EVERY, "add_prefix_space": True},
            EVERY | {"add_prefix_space": True},
        ),
        ({"type": "ChatGLM3Tokenizer", **EVERY}, {}),
        ({"type": "Llama3Tokenizer"}, {"add_bos_token": False, "add_eos_token": False}),
        (
            {"type": "Llama3Tokenizer", "add_bos_token": True},
            {"add_bos_token": True, "add_eos_token": False},
        ),
        ({"type": "LlamaTokenizer", "chat_template": "{{ a }}"}, {"chat_template": "{{ a }}"}),
    ],
)
def test_a_tokenizers_keys_are_taken_as_its_class_reads_them(
    resolve: Resolve, line: Line, given: dict[str, Any], read: dict[str, Any]
) -> None:
    found = vars(resolve(*line(given)).processor.tokenizer)
    assert {name: value for name, value in found.items() if value is not None} == {
        "type": given["type"],
        **read,
    }


def test_others_that_would_change_tokens_are_refused(faults: Faults, line: Line) -> None:
    wrong = {"errors": "strict", "legacy": False, "gmask_token": "[MASK]", "do_lower_case": True}
    for name, value in wrong.items():
        assert f"tokenizer.{name}: " in faults(*line({"type": "LlamaTokenizer", name: value}))
    merges = {"vocab_file": "a/vocab.json", "merges_file": "b/merges.txt"}
    errors = faults(*line({"type": "GPT2Tokenizer", **merges}))
    assert "expected merges.txt beside a/vocab.json" in errors


def test_keys_of_a_model_are_refused_unless_neutral(
    resolve: Resolve, faults: Faults, line: Line
) -> None:
    neutral = {
        **{"interleaved_qkv": False, "rotary_percent": 0.5, "rotary_pct": 1.0},
        **{"gated_linear_unit": True, "use_rearrange_rope": False, "mask_generate": None},
        **{"post_mlp_layernorm": False, "hidden_size_per_attention_head": 128},
    }
    resolve(*line(**neutral))
    for name in neutral:
        assert f"model_config.{name}: " in faults(*line(**{name: 7}))
