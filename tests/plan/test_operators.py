"""Which operators compute a run, and what the run says of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import native
from lite_runner.app import main
from lite_runner.architectures import limits
from lite_runner.backends.base import Backend, Row
from lite_runner.config.argv import parse
from lite_runner.config.ranks import Ranks
from lite_runner.distributed import job
from lite_runner.errors import ConfigError
from lite_runner.export.spec import spec_of
from lite_runner.model.files import ModelFiles
from lite_runner.plan import online
from lite_runner.plan.opening import open_backend
from lite_runner.plan.operators import resolve_operators, uses_native_operators
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing.need import cache_bytes
from lite_runner.system import environment, memory
from lite_runner.weights.checkpoint import model_config_of
from tests.paths import REFERENCE
from tests.refusals import refused

SHORT = ["model=tiny_llama", "predict_data=['some words','more']", "max_new_tokens=6"]


def result() -> dict:
    return json.loads(Path("outputs/latest/result.json").read_text(encoding="utf-8"))


def tokens() -> list[list[int]]:
    return [row["token_ids"] for row in result()["results"]]


def test_our_own_operators_and_mindspores_choose_the_same_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(SHORT) == 0
    assert result()["engine"] == f"mindspore, {native.instructions()} kernels"
    assert "MindSpore's operators compute" not in capsys.readouterr().err
    own = tokens()
    assert main([*SHORT, "context.kernels=false"]) == 0
    assert result()["engine"] == "mindspore"
    assert tokens() == own


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_16_bits_are_theirs_too(
    dtype: str, capsys: pytest.CaptureFixture[str], logits: Callable[..., NDArray[np.float32]]
) -> None:
    """As MindSpore's operators compute with the same weights in float32, but that what multiplies
    bfloat16 is rounded to it."""
    command = [*SHORT, f"model.model_config.compute_dtype={dtype}"]
    own = logits(*command)
    assert result()["engine"] == f"mindspore, {native.instructions()} kernels"
    assert "MindSpore's operators compute" not in capsys.readouterr().err
    chosen = tokens()
    mindspores = logits(*command, "context.kernels=false")
    assert result()["engine"] == "mindspore"
    assert tokens() == chosen
    told = capsys.readouterr().err
    assert told.count(f"compute in float32 on a CPU, with weights rounded to {dtype}") == 1
    error = abs(own - mindspores).max() / abs(own).max()
    assert error <= 1e-5 if dtype == "float16" else 1e-5 < error <= 2**-7
    wide = logits(*SHORT)
    assert abs(own - wide).max() > 1e-4 * abs(wide).max()


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NDArray[np.float32]]:
    """`logits(*arguments)` runs a command line -> those after the first prompts [rows, vocab]."""
    seen: list[NDArray[np.float32]] = []

    def opened(*arguments: Any, **options: Any) -> Backend:
        backend = open_backend(*arguments, **options)
        forward = backend.forward

        def watched(rows: Sequence[Row]) -> NDArray[np.float32]:
            seen.append(forward(rows))
            return seen[-1]

        backend.forward = watched  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(online, "open_backend", opened)

    def run(*arguments: str) -> NDArray[np.float32]:
        seen.clear()
        assert main(list(arguments)) == 0
        return seen[0]

    return run


def test_a_run_says_why_they_do_not_serve_and_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHORT, "model.model_config.compute_dtype=bfloat16"]) == 0
    chosen = tokens()
    settings = ["model.model_config.use_past=false", "model.model_config.compute_dtype=bfloat16"]
    assert main([*SHORT, *settings]) == 0
    told = capsys.readouterr().err
    why = "use_past=false -> model.model_config.use_past=true"
    assert told.count(f"MindSpore's operators compute, not this project's: {why}") == 1
    assert told.count("compute in float32 on a CPU, with weights rounded to bfloat16") == 1
    assert result()["engine"] == "mindspore"
    assert tokens() == chosen


def test_what_no_operators_compute_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "unsupported", lambda model: ["its heads are odd"])
    refused([*SHORT, "context.kernels=false"], 2)
    told = capsys.readouterr().err
    assert "nor this project's own can compute the model: its heads are odd" in told
    assert "make random weights" not in told


def test_what_ranks_hold_is_rounded_as_the_whole_is() -> None:
    model = model_config_of(REFERENCE / "llama")
    assert model is not None
    files = ModelFiles("random", None, model, 0, rounded="bfloat16")
    whole, half = files.tensors(), files.tensors(Ranks(rank=1, tensor=2))
    name = "model.layers.0.feed_forward.w1.weight"
    rows = whole[name].shape[0] // 2
    np.testing.assert_array_equal(half[name].float32(), whole[name].float32()[rows:])
    exact = replace(files, rounded="float32").tensors()
    assert abs(whole[name].float32() - exact[name].float32()).max() > 0
    norm = "model.layers.0.ffn_norm.weight"
    assert half[norm].read().tobytes() == exact[norm].read().tobytes()


def test_integers_stay_integers_beside_weights_of_16_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SHORT, "quant=a16w8"]) == 0
    chosen = tokens()
    assert main([*SHORT, "quant=a16w8", "model.model_config.compute_dtype=float16"]) == 0
    told = capsys.readouterr().err
    assert told.count("compute_dtype=float16: quantized weights stay as they are") == 1
    assert tokens() == chosen


def test_without_a_compiler_mindspores_serve_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "LIBRARY", Path("nowhere/operators.so"))
    assert main([*SHORT, "quant=a16w8"]) == 0
    told = capsys.readouterr().err
    why = "they were not built: the set-up found no C++ compiler -> install a C++ compiler"
    assert told.count(why) == 1
    assert told.count("fall back to dequantized weights") == 1


def test_operators_of_other_sources_do_not_compute(
    other_operators: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*SHORT, "model.model_config.compute_dtype=float16"]
    assert main(command) == 0
    expected = tokens()
    capsys.readouterr()
    monkeypatch.setattr(native, "LIBRARY", other_operators)
    assert main(command) == 0
    assert tokens() == expected
    why = "not this project's: they were built from other sources than those beside them -> build"
    assert capsys.readouterr().err.count(why) == 1
    refused([*SHORT, "kv_cache=int8"], 2)
    assert "do not serve here: they were built from other sources" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_a_rounded_cache_needs_them(capsys: pytest.CaptureFixture[str], cache: str) -> None:
    assert main([*SHORT, f"kv_cache={cache}"]) == 0
    refused([*SHORT, f"kv_cache={cache}", "context.kernels=false"], 2)
    told = capsys.readouterr().err
    assert f"kv_cache={cache} needs this project's own operators" in told
    assert "context.kernels=false\n  -> context.kernels=true; or kv_cache=fp32" in told


def test_a_rounded_cache_is_refused_before_memory_is_asked_for_and_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    refused([*SHORT, "kv_cache=int8"], 3)
    assert "0 B is free" in capsys.readouterr().err
    refused([*SHORT, "kv_cache=int8", "context.kernels=false"], 2)
    told = capsys.readouterr().err
    assert "kv_cache=int8 needs this project's own operators" in told
    assert "make random weights" not in told


def test_a_rounded_cache_is_refused_before_any_rank_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    refused([*SHORT, "kv_cache=int8", "parallel=tp2"], 2)
    assert "which do not serve here: several ranks share the model" in capsys.readouterr().err


def test_a_rounded_cache_takes_less_memory() -> None:
    model = model_config_of(REFERENCE / "llama")
    assert model is not None
    needs = [cache_bytes(model, "float32", 2, 100, cache) for cache in ("fp32", "fp16", "int8")]
    scales = 2 * model.num_layers * model.n_kv_heads * 2 * 100 * 4
    assert needs[1] * 2 == needs[0] and (needs[2] - scales) * 4 == needs[0]


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`ascend("Ascend910A")`: a machine with two such processors, whose CPU computes."""

    def machine(name: str) -> None:
        monkeypatch.setattr(environment, "ascend_devices", lambda: 2)
        monkeypatch.setattr(environment, "ascend_soc", lambda: name)
        monkeypatch.setattr(
            "lite_runner.backends.mindspore_network.set_device", lambda *_, **__: None
        )

    return machine


@pytest.mark.parametrize("parallel", ["single", "dp2"])
def test_integers_need_atlas_a2(
    parallel: str,
    ascend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    ascend("Ascend910A")
    refused([*SHORT, "quant=a16w8", f"parallel={parallel}"], 3)
    told = capsys.readouterr().err
    assert "quant=a16w8: Ascend910A has no operators that multiply by integers" in told
    assert "quant=none, or on this machine's processor with context.device_target=CPU" in told
    assert "make random weights" not in told
    assert main([*SHORT, "quant=a16w8", "context.device_target=CPU"]) == 0


def test_atlas_800_computes_with_what_integers_stand_for(
    ascend: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run_mode=quantize", "model=tiny_llama", "quant=a16w8", "quantize_output=small"]
    assert main(command) == 0
    ascend("Ascend910A")
    capsys.readouterr()
    assert main([*SHORT, "load_checkpoint=small"]) == 0
    told = capsys.readouterr().err
    assert "fall back to dequantized weights" in told


@pytest.mark.parametrize(
    ("name", "dtype", "code"),
    [("Ascend910B3", "auto", 2), ("Ascend910B3", "float32", 0), ("Ascend910A", "auto", 0)],
)
def test_wide_heads_are_refused_where_attention_is_fused(
    name: str,
    dtype: str,
    code: int,
    ascend: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ascend(name)
    wide = [f"model.model_config.{key}" for key in ("head_dim=272", f"compute_dtype={dtype}")]
    assert main([*SHORT, *wide]) == code
    told = capsys.readouterr().err
    refused = "model.model_config.head_dim: got 272, but attention on Ascend takes at most 256"
    assert (refused in told) == (code == 2)
    assert ("make random weights" in told) == (code == 0)


def test_a_model_that_they_cannot_compute_is_refused_before_anything_is_read() -> None:
    config, _ = resolve(parse(SHORT, heads()))
    model = config.model_config()
    assert model is not None
    first, second = model.blocks
    turned = replace(second.attention, rotary=None, alibi=True)
    blocks = (first, replace(second, attention=turned))
    files = ModelFiles("nowhere", None, replace(model, blocks=blocks), 0)
    assert not uses_native_operators(config, files, "CPU", Ranks())
    reason = "positions differ between its layers"
    with pytest.raises(ConfigError, match=f"can compute the model: {reason}"):
        resolve_operators(config, files, "CPU", Ranks())
    quantized = replace(config, quant="a16w8")
    files = replace(files, quantization=quantized.quantization)
    with pytest.raises(ConfigError, match=f"quant=a16w8 is not available in an export: {reason}"):
        spec_of(quantized, files, slots=1, length=64)
