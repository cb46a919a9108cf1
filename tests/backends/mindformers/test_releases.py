"""The release that computes, and its Python: on an Ascend device that of this one, if any."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from lite_runner.architectures.spec import RopeScaling
from lite_runner.backends.mindformers import releases
from lite_runner.backends.mindformers.releases import (
    RELEASES,
    V1_0_2,
    V1_9_0,
    Sizes,
    choose_release,
    pad_token,
    python_for,
    static_length,
)
from lite_runner.backends.workers import python as workers
from lite_runner.errors import ConfigError, EnvironmentFault
from tests.each import each
from tests.models import model_named, reference_model
from tests.paths import ROOT

QWEN2 = reference_model("qwen2")


def install(monkeypatch: pytest.MonkeyPatch, release: str | None) -> None:
    def version(name: str) -> str:
        assert name == "mindformers"
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(releases, "version", version)


def test_on_a_cpu_what_is_installed_here_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, "1.9.0")
    chosen = choose_release(QWEN2, "qwen2", wanted=None, use_past=True)
    assert chosen is V1_0_2
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_PYTHON", str(python))
    assert python_for(chosen, "CPU") == python


def test_on_ascend_the_installed_one_computes_in_this_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, "1.9.0")
    chosen = choose_release(QWEN2, "qwen2", wanted=None, use_past=True, device="Ascend")
    assert chosen.name == "1.9.0" and chosen.caches and not chosen.context
    assert python_for(chosen, "Ascend") == Path(sys.executable)
    settings = chosen.model_section(QWEN2, Sizes(2, 40, "float16", use_past=True))["model_config"]
    # Two rows of three blocks of 16, and one beside them.
    assert (settings["is_dynamic"], settings["block_size"], settings["num_blocks"]) == (True, 16, 7)
    assert settings["use_flash_attention"] is True
    assert not {"fused_rms_norm", "use_rope_slice"} & settings.keys()
    without = chosen.model_section(QWEN2, Sizes(2, 40, "float16", use_past=False))["model_config"]
    assert "block_size" not in without


@pytest.mark.parametrize(
    ("installed", "wanted", "expected"),
    [
        ("1.3.2", None, "this Python has mindformers 1.3.2, expected 1.0.2 or 1.9.0"),
        ("1.9.0", "1.0.2", "this Python has mindformers 1.9.0, expected 1.0.2"),
    ],
)
def test_another_one_is_installed(
    monkeypatch: pytest.MonkeyPatch, installed: str, wanted: str | None, expected: str
) -> None:
    install(monkeypatch, installed)
    with pytest.raises(EnvironmentFault, match=expected):
        choose_release(QWEN2, "qwen2", wanted=wanted, use_past=True, device="Ascend")


def test_on_ascend_without_one_a_python_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, None)
    chosen = choose_release(QWEN2, "qwen2", wanted="1.9.0", use_past=True, device="Ascend")
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("LITE_RUNNER_MINDFORMERS_1_9_PYTHON", str(python))
    assert python_for(chosen, "Ascend") == python


def test_models_that_no_release_computes() -> None:
    with pytest.raises(
        ConfigError, match=r"1\.9\.0 cannot compute qwen2: its cache needs operators of Ascend"
    ):
        choose_release(QWEN2, "qwen2", wanted="1.9.0", use_past=True)


PINS = {"1.0.2": ["mindformers"], "1.9.0": ["mindformers-1.9", "lock"]}  # requirements/


@pytest.mark.parametrize("name", RELEASES)
def test_the_pins_are_the_ones_that_are_advised(name: str) -> None:
    release = RELEASES[name]
    files = (ROOT / "requirements" / f"{one}.txt" for one in PINS[name])
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    pins = {line.partition(" ")[0] for line in lines}  # hashes follow some
    advised = {word for word in release.python.elsewhere.split() if "==" in word}
    assert {f"mindformers=={name}", f"mindspore=={release.mindspore}"} <= advised <= pins


@pytest.mark.parametrize("name", RELEASES)
def test_the_command_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    python = RELEASES[name].python
    monkeypatch.delenv(python.variable, raising=False)
    monkeypatch.setenv("LITE_RUNNER_CACHE", "/nowhere")
    monkeypatch.setattr(workers, "_CHECKOUT", ROOT / "tests")
    with pytest.raises(EnvironmentFault, match=f"no Python with MindFormers {name}") as caught:
        python.find()
    assert "in a checkout: make mindformers" in caught.value.hint
    assert caught.value.exit_code == 3


SIZES = Sizes(batch=2, length=20, dtype="float32", use_past=True)


@each(
    ("case", "reason"),
    [
        ("bloom", ""),
        ("gpt2", ""),
        ("gpt2_inner", "its feed-forward is a multiple of hidden_size"),
        ("llama", "its heads have hidden_size / num_heads dimensions"),
        ("llama_tied_mha", ""),
        ("llama_rope_linear", "dimensions, not 16"),
        ("llama_rope_llama3", "it has no llama3 scaling of rotary positions"),
        ("llama_biases", "biases on q, k and v only"),
        ("qwen2", ""),
        ("qwen2_window", "no sliding windows"),
        ("qwen3", "it has no Qwen3Config"),
        ("chatglm", "its heads have hidden_size / num_heads dimensions"),
        ("glm4", "it has no Glm4Config"),
    ],
)
def test_models_that_it_cannot_compute(case: str, reason: str) -> None:
    found = "; ".join(V1_0_2.unsupported(reference_model(case), use_past=True))
    assert reason in found and bool(reason) == bool(found)


def test_an_epsilon_of_layernorm() -> None:
    bloom = reference_model("bloom")
    other = replace(bloom, norm=replace(bloom.norm, eps=1e-6))
    assert V1_0_2.unsupported(other, use_past=True) == [
        "its LayerNorm has an epsilon of 1e-05, not 1e-06"
    ]


def test_a_llama_as_yaml() -> None:
    model = reference_model("llama_tied_mha")
    assert model.rotary is not None
    scaled = model.with_rope_scaling(RopeScaling("linear", 4.0, original_seq_length=8))
    section = V1_0_2.model_section(scaled, SIZES)
    assert section["arch"] == {"type": "LlamaForCausalLM"}
    settings = section["model_config"]
    assert settings["type"] == "LlamaConfig"
    assert (settings["batch_size"], settings["seq_length"]) == (2, 20)
    assert (settings["extend_method"], settings["scaling_factor"]) == ("PI", 4.0)
    assert settings["max_position_embedding"] == model.seq_length
    plain = V1_0_2.model_section(model, SIZES)["model_config"]
    assert (plain["extend_method"], plain["theta"]) == ("None", model.rotary.theta)
    assert plain["n_kv_heads"] == model.n_kv_heads


def test_differences_between_families() -> None:
    bloom, gpt2, llama = (model_named(f"tiny_{name}") for name in ("bloom", "gpt2", "llama"))
    assert [static_length(model, 20) for model in (bloom, gpt2)] == [20, gpt2.seq_length]
    assert V1_0_2.computed_in(bloom, "float32", use_past=True) == "float16"
    assert V1_0_2.computed_in(bloom, "float32", use_past=False) == "float32"
    assert V1_0_2.computed_in(gpt2, "float32", use_past=True) == "float32"
    ends = bloom.eos_token_id[:1]
    assert (
        V1_0_2.hidden_tokens(bloom, use_past=True) == ()
        and V1_0_2.hidden_tokens(bloom, use_past=False) == ends
    )
    assert V1_0_2.hidden_tokens(gpt2, use_past=True) == gpt2.eos_token_id[:1]
    assert V1_0_2.hidden_tokens(llama, use_past=True) == (llama.pad_token_id,)
    glm2 = reference_model("chatglm")
    assert [V1_0_2.rows_together(glm2, 3, use_past=past) for past in (True, False)] == [1, 3]
    assert V1_0_2.rows_together(llama, 3, use_past=True) == 3
    assert V1_0_2.tensor_name(glm2, "transformer.embedding.embedding_weight").endswith(
        "embedding_table"
    )
    assert V1_0_2.tensor_name(llama, "lm_head.weight") == "lm_head.weight"
    without = replace(llama, pad_token_id=None)
    assert pad_token(without) == llama.eos_token_id[0]
    assert pad_token(replace(without, eos_token_id=())) == 0


def test_a_llama_as_yaml_of_1_9() -> None:
    model = reference_model("llama_rope_llama3")
    settings = V1_9_0.model_section(model, SIZES)["model_config"]
    assert settings["extend_method"] == "LLAMA3"
    assert sorted(settings["scaling_factor"]) == [
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "original_max_position_embeddings",
    ]
    tied = V1_9_0.model_section(reference_model("llama_tied_mha"), SIZES)["model_config"]
    assert tied["tie_word_embeddings"] is True and tied["extend_method"] == "None"
    assert tied["fused_rms_norm"] is False  # its operator has no kernel on a CPU


@pytest.mark.parametrize(
    ("case", "use_past", "expected"),
    [
        ("bloom", False, "1.0.2"),
        ("llama_tied_mha", True, "1.0.2"),
        ("llama_tied_mha", False, "1.0.2"),
        ("qwen2", True, "1.0.2"),  # 1.9.0 has no cache on a CPU
        ("qwen2", False, "1.9.0"),
    ],
)
def test_the_release_of_a_model(case: str, use_past: bool, expected: str) -> None:
    model = reference_model(case)
    assert choose_release(model, case, wanted=None, use_past=use_past).name == expected


def test_no_release_at_all() -> None:
    with pytest.raises(ConfigError) as caught:
        choose_release(reference_model("qwen3"), "small", wanted=None, use_past=False)
    message = caught.value.message
    assert "MindFormers 1.0.2 cannot compute small: it has no Qwen3Config" in message
    assert "MindFormers 1.9.0 cannot compute small: it has no Qwen3Config" in message
    llama = reference_model("llama_tied_mha")
    for given, words in (
        ({"use_past": True}, "1.9.0 cannot compute small: its cache needs operators of Ascend"),
        ({"use_past": False, "beams": 2}, "1.9.0 cannot compute small: it has no beam search"),
    ):
        with pytest.raises(ConfigError, match=words):
            choose_release(llama, "small", wanted="1.9.0", **given)
