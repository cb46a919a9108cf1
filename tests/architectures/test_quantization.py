from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner import run_modes
from lite_runner.architectures.quantization import Quant, Quantization, Scheme, schemes
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError
from lite_runner.sizing import parameter_count, weight_bytes
from lite_runner.weights.quantization.quantized_checkpoint import weights_bytes
from tests.each import each
from tests.models import reference_model

Resolve = Callable[..., RunConfig]
Faults = Callable[..., str]


def test_a_tied_head_is_the_embedding_that_stays_float() -> None:
    for case, table in (("llama_tied_mha", True), ("llama", False)):
        model = reference_model(case)
        kept = schemes(model, Quantization("a16w8", kept=("lm_head",)))
        left = schemes(model, Quantization("a16w8")).keys() - kept.keys()
        assert left == {"model.tok_embeddings.embedding_weight" if table else "lm_head.weight"}


def test_settings_to_schemes() -> None:
    assert Quantization.of(None, None) == Quantization.of("none", None) == Quantization()
    assert Quantization.of("a16w4", None).linear == Scheme(4, 32)
    assert Quantization.of("a16w4", 128).linear == Scheme(4, 128)
    assert Quantization.of("a16w4", 128).table == Scheme(8, 32)
    assert Quantization.of("a8w8", None).linear == Quantization.of("a8w8", None).table
    assert str(Quantization.of("a16w4", 64)) == "a16w4 quant_group=64"
    assert Scheme(8, 0).nbytes(10, 64) == 640 + 40
    assert Scheme(4, 32).nbytes(10, 64) == 320 + 10 * 2 * 4  # 5 bits a weight


@each(
    ("settings", "expected"),
    [
        (["quant=int8"], "quant: got 'int8', expected one of none, a16w8, a16w4, a8w8"),
        (["quant=a16w4", "quant_group=48"], "quant_group: got 48, expected one of 32, 64, 128"),
        (["quant=a16w8", "quant_group=32"], "quant_group=32 needs quant=a16w4"),
        (["quant_group=32"], "quant_group=32 needs quant=a16w4"),
        (
            ["modules_to_not_convert=[w2]"],
            "modules_to_not_convert needs quant=a16w8, a16w4 or a8w8",
        ),
        (
            ["quant=a8w8", "modules_to_not_convert=[lm_head,w9]"],
            "got 'w9', which is in no name of the model's modules (embedding_weight, wq, wk, wv",
        ),
        (
            ["quant=a16w8", "backend=mslite", "export.layout=resizable"],
            "quant=a16w8 is not available with backend=mslite: graphs compute with floats",
        ),
        (
            ["quant=a8w8", "model.model_config.use_past=false"],
            "quant=a8w8 is not available with model.model_config.use_past=false",
        ),
        (["quantize_output=x"], "quantize_output has no effect with run_mode=predict"),
    ],
)
def test_conflicting_settings_are_refused(
    settings: list[str], expected: str, faults: Faults
) -> None:
    assert expected in faults("model=tiny_llama", "predict_data=x", *settings)


@each(
    ("settings", "expected"),
    [
        (["run_mode=quantize", "quant=a16w8"], "quantize_output is empty"),
        (["run_mode=quantize", "quantize_output=x"], "run_mode=quantize needs quant=a16w8, a16w4"),
        (["run_mode=quantize", "quant=none"], "run_mode=quantize needs quant=a16w8"),
        (
            ["run_mode=quantize", "quant=a16w8", "quantize_output=x", "quantize.method=gptq"],
            "quantize.method=gptq needs quant=a16w4, got quant=a16w8",
        ),
        (["run_mode=quantize", "predict_data=x"], "predict_data has no effect with run_mode=quan"),
        (["run_mode=quantize", "adapter_path=x"], "adapter_path has no effect with run_mode=qu"),
        (
            ["run_mode=convert", "convert_output=x.safetensors", "quant=a16w8"],
            "quant=a16w8 has no effect with run_mode=convert, which writes floats",
        ),
        (
            ["run_mode=export", "quant=a16w8", "engine=lite"],
            "quant=a16w8 is not available with run_mode=export: graphs compute with floats",
        ),
        (["run_mode=slora", "quant=a16w8"], "quant=a16w8 is not available with run_mode=slora"),
    ],
)
def test_run_modes(settings: list[str], expected: str, faults: Faults) -> None:
    assert expected in faults("model=tiny_llama", *settings)


YAML = """
trainer: {{model_name: llama2_7b}}
model:
  arch: {{type: LlamaForCausalLM}}
  model_config:
    type: LlamaConfig
    quantization_config: {section}
"""


@pytest.mark.parametrize(
    ("section", "quant"),
    [
        ("{quant_method: rtn, weight_dtype: int8, activation_dtype: None}", "a16w8"),
        ("{quant_method: rtn, weight_dtype: int4, activation_dtype: fp16}", "a16w4"),
        ("{weight_dtype: int8, activation_dtype: int8, kvcache_dtype: none}", "a8w8"),
        ("{quant_method: smooth_quant, weight_dtype: int8, activation_dtype: int8}", "a8w8"),
        ("{quant_method: rtn, weight_dtype: none}", None),
        ("{weight_dtype: int8, kvcache_dtype: int8}", "a16w8"),
        ("null", None),
    ],
)
def test_a_yaml_of_run_mindformer(
    section: str, quant: Quant | None, resolve: Resolve, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(YAML.format(section=section))
    config = resolve("--config", str(tmp_path / "x.yaml"), "predict_data=x")
    assert config.quant == quant
    assert config.kv_cache == ("int8" if "kvcache_dtype: int8" in section else None)
    own = resolve("--config", str(tmp_path / "x.yaml"), "predict_data=x", "quant=a8w8")
    assert own.quant == "a8w8"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{quant_method: omni_quant, weight_dtype: int8}", "got 'omni_quant', expected rtn"),
        ("{weight_dtype: int4, activation_dtype: int8}", "got weight_dtype 'int4' with activation"),
        ("{weight_dtype: [1]}", "got weight_dtype"),
        ("{kvcache_dtype: int4}", "kvcache_dtype: got 'int4', expected int8 or none"),
        ("7", "quantization_config: got 7, expected a section"),
    ],
)
def test_quantizations_of_other_meaning(
    section: str, expected: str, faults: Faults, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(YAML.format(section=section))
    assert expected in faults("--config", str(tmp_path / "x.yaml"), "predict_data=x")


@each("name", ["smollm2_135m", "bloom_560m", "gpt2", "qwen2_0.5b", "llama2_7b"])
@each("quant", ["a16w8", "a16w4"])
def test_memory_is_that_of_the_file(name: str, quant: Quant, resolve: Resolve) -> None:
    config = resolve(f"model={name}", "predict_data=x", f"quant={quant}")
    model = config.model_config()
    assert model is not None
    quantization = config.quantization
    found = weight_bytes(model, "float32", quantization)
    assert found == pytest.approx(weights_bytes(model, schemes(model, quantization)), rel=0.01)
    assert weight_bytes(model, "float32", Quantization()) == 4 * parameter_count(model)


def test_errors_are_of_the_config() -> None:
    with pytest.raises(ConfigError):
        run_modes.from_dict({"quant": 8})
