"""Choice of the backend for a run, and the run's line about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lite_runner import architectures, native
from lite_runner.app import main
from lite_runner.backends import Backend, Completer, Row
from lite_runner.backends.lite.export.job import spec_of
from lite_runner.config.argv import parse
from lite_runner.config.schema import ComputeOptions, ExportedOptions
from lite_runner.config.sections import Ranks
from lite_runner.distributed import job
from lite_runner.errors import ConfigError
from lite_runner.model import ModelFiles
from lite_runner.plan import Job, resources
from lite_runner.plan.resources import choose, run_options
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing import cache_bytes
from lite_runner.system import environment, memory
from lite_runner.weights.checkpoint import model_config_of
from tests.paths import REFERENCE
from tests.refusals import refused

SHORT = ["model=tiny_llama", "predict_data=['some words','more']", "max_new_tokens=6"]
NOTHING_LOADED = "make random weights"


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("outputs/latest/result.json").read_text("utf-8"))
    return found


def tokens() -> list[list[int]]:
    return [row["token_ids"] for row in result()["results"]]


@pytest.fixture
def stderr_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`stderr_of(*settings)` runs SHORT with them -> standard error."""

    def run(*settings: str) -> str:
        capsys.readouterr()
        assert main([*SHORT, *settings]) == 0, settings
        return capsys.readouterr().err

    return run


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, str]]:
    """`planned(*settings)`: the lines of a dry run of SHORT by their labels."""

    def run(*settings: str) -> dict[str, str]:
        capsys.readouterr()
        assert main([*SHORT, *settings, "dry_run=true"]) == 0, settings
        lines = [line.partition("  ") for line in capsys.readouterr().out.splitlines()]
        return {label: text.strip() for label, _, text in lines}

    return run


def test_auto_is_the_first_without_an_objection(planned: Callable[..., dict[str, str]]) -> None:
    own = f"native: lite-runner's own kernels ({native.instructions()})"
    mindspore = "ms: MindSpore's operators on CPU"
    exported = "mslite: an exported model, in the cache or exported first"
    chosen = {
        "seed=1": own,
        "quant=a8w8": own,
        "context.mode=1": mindspore,
        "model.model_config.use_past=false": mindspore,
        "backend=ms": mindspore,
        "context.device_target=Ascend": "ms: MindSpore's operators on Ascend",
        "engine=graph-cell": exported,
        "export.layout=static_pair": exported,
        "backend=mslite": exported,
    }
    assert {setting: planned(setting)["backend"] for setting in chosen} == chosen


def test_a_plan_says_what_else_could_compute(planned: Callable[..., dict[str, str]]) -> None:
    others = {
        "seed=1": "ms: supported; mslite: supported; mindformers: only with backend=mindformers",
        "quant=a16w8": "mslite: quant=a16w8: graphs compute with floats",
        "context.mode=1": "native: context.mode=1 runs MindSpore's operators one by one; mslite:"
        " context.mode=1 (pynative): an exported model is a graph",
        "context.device_target=Ascend": "native: its kernels are for CPUs, got Ascend; mslite:",
    }
    for setting, expected in others.items():
        assert expected in planned(setting)["others"]


def test_a_run_says_what_computes_and_why(
    stderr_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stderr = stderr_of()
    assert (
        stderr.count(f"backend=native: lite-runner's own kernels ({native.instructions()})\n") == 1
    )
    assert "supported" not in stderr
    assert "backend=" not in stderr_of("verbosity=0")
    stderr = stderr_of("verbosity=2")
    assert stderr.count("other backends: ms: supported; mslite: supported; mindformers: only") == 1
    why = "context.mode=1 runs MindSpore's operators one by one"
    monkeypatch.setattr(memory, "free_memory", lambda: 0)  # nothing is computed
    refused([*SHORT, "context.mode=1"], 3)
    stderr = capsys.readouterr().err
    assert stderr.count(f"backend=ms: MindSpore's operators on CPU (native: {why})\n") == 1


def test_choosing_a_backend_imports_no_mindspore(
    planned: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(environment, "import_mindspore", lambda: pytest.fail("imported"))
    assert "ms: supported" in planned()["others"]
    assert "mindspore" not in sys.modules


def test_a_named_backend_that_cannot_compute_is_refused_with_one_that_can(
    planned: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        ("backend=native", "context.mode=1"): ("context.mode=1 runs MindSpore's", "backend=ms"),
        ("backend=ms", "kv_cache=int8"): ("kv_cache=int8 needs", "backend=native"),
        ("backend=mslite", "kv_cache=fp16"): ("kv_cache=fp16 needs", "backend=native"),
        ("backend=ms", "speculate=ngram"): ("speculate=ngram needs", "backend=native"),
        ("backend=mslite", "speculate=ngram"): ("speculate=ngram needs", "backend=native"),
        ("backend=ms", "draft_model=tiny_llama"): ("draft_model= needs", "backend=native"),
        ("backend=mslite", "draft_model=tiny_llama"): ("draft_model= needs", "backend=native"),
    }
    for settings, (why, can) in cases.items():
        refused([*SHORT, *settings], 2)
        error = capsys.readouterr().err
        assert f"{settings[0]} cannot compute this run: " in error and why in error
        assert f"-> {can} can compute it\n" in error and NOTHING_LOADED not in error
        assert planned(*settings, can)["backend"].startswith(f"{can[8:]}: ")


def test_the_same_bits_everywhere_are_of_native_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "backend=ms", "context.reproducible=true"]) == 2
    stderr = capsys.readouterr().err
    assert (
        "context.reproducible=true needs backend=native" in stderr
        and "backend=native can" in stderr
    )


def test_a_run_for_no_backend_names_every_objection(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused([*SHORT, "kv_cache=int8", "context.mode=1"], 2)
    error = capsys.readouterr().err
    assert "no backend can compute this run: backend=native: context.mode=1" in error
    assert "; backend=ms: kv_cache=int8 needs backend=native" in error
    assert "; backend=mslite: " in error and NOTHING_LOADED not in error
    monkeypatch.setattr(architectures, "unsupported", lambda model, **_: ["its heads are odd"])
    refused([*SHORT, "backend=ms"], 2)
    error = capsys.readouterr().err
    assert "backend=ms cannot compute this run: its heads are odd" in error


def test_a_comparison_needs_two_backends(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the name of one of them is auto; reported before anything is loaded."""
    cases = {
        "compare_backend=native": "compare_backend=native: backend=auto is native here",
        "compare_backend=auto": "compare_backend=auto: got backend=auto, expected another one",
        "compare_backend=mslite": "compare_backend=mslite: kv_cache=int8 needs backend=native",
        "compare_backend=ms": "compare_backend=ms: kv_cache=int8 needs backend=native",
    }
    for setting, why in cases.items():
        refused([*SHORT, setting, "kv_cache=int8"], 2)
        error = capsys.readouterr().err
        assert why in error and NOTHING_LOADED not in error
    refused([*SHORT, "compare_backend=native"], 2)
    assert "-> backend=ms can compute it\n" in capsys.readouterr().err
    refused([*SHORT, "compare_backend=ms", "context.mode=1"], 2)
    error = capsys.readouterr().err
    assert "backend=auto is ms here" in error and " can compute it\n" not in error


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., NDArray[np.float32]]:
    """`logits(*settings)` runs SHORT -> those after the first prompts [rows, vocab]."""
    seen: list[NDArray[np.float32]] = []
    opens = resources._open

    def opened(*arguments: Any, **options: Any) -> Backend:
        backend = opens(*arguments, **options)
        assert not isinstance(backend, Completer)
        forward = backend.forward

        def watched(rows: Sequence[Row]) -> NDArray[np.float32]:
            seen.append(forward(rows))
            return seen[-1]

        backend.forward = watched  # type: ignore[method-assign]
        return backend

    monkeypatch.setattr(resources, "_open", opened)

    def run(*settings: str) -> NDArray[np.float32]:
        seen.clear()
        assert main([*SHORT, *settings]) == 0
        return seen[0]

    return run


@pytest.mark.usefixtures("float32_cache")
def test_our_own_kernels_and_mindspores_operators_compute_the_same(
    capsys: pytest.CaptureFixture[str], logits: Callable[..., NDArray[np.float32]]
) -> None:
    """With weights of every type; but that what multiplies bfloat16 is rounded to it."""
    wide: NDArray[np.float32] | None = None
    for dtype in ("float32", "float16", "bfloat16"):
        setting = f"model.model_config.compute_dtype={dtype}"
        own = logits(setting, "max_new_tokens=1")
        assert result()["engine"] == f"native, {native.instructions()} kernels"
        chosen = tokens()
        capsys.readouterr()
        mindspores = logits(setting, "max_new_tokens=1", "context.mode=1")
        assert result()["engine"] == "mindspore" and tokens() == chosen
        rounded = f"compute in float32 on a CPU, with weights rounded to {dtype}"
        assert capsys.readouterr().err.count(rounded) == (dtype != "float32")
        error = abs(own - mindspores).max() / abs(own).max()
        assert 1e-5 < error <= 2**-7 if dtype == "bfloat16" else error <= 1e-5
        wide = own if wide is None else wide
        assert dtype == "float32" or abs(own - wide).max() > 1e-4 * abs(wide).max()


def test_tensors_of_ranks_are_rounded_as_the_whole() -> None:
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


def test_integers_stay_integers_beside_weights_of_16_bits(stderr_of: Callable[..., str]) -> None:
    stderr_of("quant=a16w8")
    chosen = tokens()
    stderr = stderr_of("quant=a16w8", "model.model_config.compute_dtype=float16")
    assert stderr.count("compute_dtype=float16: quantized weights stay as they are") == 1
    assert tokens() == chosen


def test_without_a_compiler_mindspore_serves_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, planned: Callable[..., dict[str, str]]
) -> None:
    monkeypatch.setattr(native, "LIBRARY", Path("nowhere/operators.so"))
    plan = planned("quant=a16w8")
    assert plan["backend"].startswith("ms:")
    why = "native: its kernels were not built: the set-up found no C++ compiler -> install a C++"
    assert plan["others"].startswith(why)


def test_kernels_of_other_sources_do_not_compute(
    other_operators: Path,
    monkeypatch: pytest.MonkeyPatch,
    planned: Callable[..., dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(native, "LIBRARY", other_operators)
    plan = planned()
    assert plan["backend"].startswith("ms:")
    why = "native: its kernels were built from other sources than those beside them -> build"
    assert plan["others"].startswith(why)
    refused([*SHORT, "kv_cache=int8"], 2)
    assert "its kernels were built from other sources" in capsys.readouterr().err


def test_a_rounded_cache_is_refused_before_memory_is_asked_for_and_ranks_are_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    refused([*SHORT, "kv_cache=int8"], 3)
    assert "0 B is free" in capsys.readouterr().err
    refused([*SHORT, "kv_cache=int8", "backend=ms"], 2)
    assert "kv_cache=int8 needs backend=native" in capsys.readouterr().err


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
            "lite_runner.backends.mindspore.backend.set_device", lambda *_, **__: None
        )

    return machine


def test_integers_need_atlas_a2(
    ascend: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    stderr_of: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job, "run_ranks", lambda *_, **__: pytest.fail("ranks were started"))
    ascend("Ascend910A")
    for parallel in ("single", "dp2"):
        refused([*SHORT, "quant=a16w8", f"parallel={parallel}"], 3)
        error = capsys.readouterr().err
        assert "quant=a16w8: Ascend910A has no operators that multiply by integers" in error
        assert "quant=none, or on this machine's processor with context.device_target=CPU" in error
        assert NOTHING_LOADED not in error
    stderr_of("quant=a16w8", "context.device_target=CPU")


def test_atlas_800_computes_with_what_integers_stand_for(
    ascend: Callable[[str], None], stderr_of: Callable[..., str]
) -> None:
    one = "model.model_config.num_layers=1"  # to compile
    command = ["run_mode=quantize", "model=tiny_llama", one, "quant=a16w8"]
    assert main([*command, "quantize_output=small"]) == 0
    ascend("Ascend910A")
    stderr = stderr_of("load_checkpoint=small", one, "max_new_tokens=1")
    assert "fall back to dequantized weights" in stderr


def test_wide_heads_are_refused_where_attention_is_fused(
    ascend: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        ("Ascend910B3", "auto", 0): 2,
        ("Ascend910B3", "float32", 0): 0,
        ("Ascend910B3", "auto", 1): 0,
        ("Ascend910A", "auto", 0): 0,
    }
    for (name, dtype, mode), code in cases.items():
        ascend(name)
        wide = [f"model.model_config.{key}" for key in ("head_dim=272", f"compute_dtype={dtype}")]
        command = [*SHORT, *wide, f"context.mode={mode}", "backend=ms", "dry_run=true"]
        assert main(command) == code
        text = "model.model_config.head_dim: got 272, but attention on Ascend takes at most 256"
        assert (text in capsys.readouterr().err) == (code == 2)


def test_a_model_that_kernels_cannot_compute_is_refused_before_anything_is_read() -> None:
    config, _ = resolve(parse(SHORT, heads()))
    assert isinstance(config, ComputeOptions)
    model = config.model_config()
    assert model is not None
    first, second = model.blocks
    turned = replace(second.attention, rotary=None, alibi=True)
    blocks = (first, replace(second, attention=turned))
    files = ModelFiles("nowhere", None, replace(model, blocks=blocks), 0)
    options = run_options(config.settings, Job.without_prompts(1, 64), "CPU")
    with pytest.raises(ConfigError, match="positions differ between its layers"):
        choose(files, options)
    assert isinstance(config, ExportedOptions)
    with pytest.raises(ConfigError, match="positions differ between its layers"):
        spec_of(config.settings, files, slots=1, length=64)
