"""Memory estimates of the native kernels; tests/system/test_peaks.py compares them with what
runs took."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.backends.native.prefix_files import QUEUED
from lite_runner.plan import resources
from lite_runner.system import memory
from lite_runner.weights import cast
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.layouts import random_checkpoint
from tests.backends.shared import hints_of, need_of
from tests.model_gguf import write_model_gguf
from tests.models import model_named
from tests.paths import REFERENCE, ROOT
from tests.refusals import refused
from tests.tokenizer_files import write_ascii_tokenizer

HALF = "model.model_config.compute_dtype=float16"
RANDOM = ("model=smollm2_135m", "load_checkpoint=random")
Dry = Callable[..., str]


def test_logits_of_prompts_are_counted() -> None:
    row = 2 * 4 * 49152
    plain = need_of()
    assert need_of("logprobs=5") == plain
    scored = need_of("prompt_logprobs=0")
    assert scored.work - plain.work == (256 - 2) * row  # as many as a step gives, not two
    assert need_of("predict_data=[{prompt: x, prompt_logprobs: 0},y]") == scored


def test_weights_are_counted_by_their_size_in_memory(dry: Dry, tmp_path: Path) -> None:
    base = [*RANDOM, "predict_data=[x,y]"]
    assert "269.1 MB as float16" in dry(*base, HALF)
    assert "269.1 MB as float16 in each rank" in dry(*base, HALF, "parallel=dp2")
    assert "96.6 MB as integers (quant=a16w4 quant_group=32)" in dry(*base, "quant=a16w4")
    model = model_named("tiny_llama")
    tensors = {name: cast(name, one, "BF16") for name, one in random_checkpoint(model, 0).items()}
    write_safetensors(tmp_path / "half.safetensors", tensors, {})
    of_file = ["model=tiny_llama", "predict_data=hi", "load_checkpoint=half.safetensors"]
    assert "as bfloat16" in dry(*of_file) and "as float32" in dry(*of_file, "backend=ms")


def test_the_bits_of_inputs_are_those_that_some_matrix_has(dry: Dry, tmp_path: Path) -> None:
    """MXFP4's inputs have 16, whatever quant= says."""
    for kind, more, bits in (
        ("Q8_0", [], 8),
        ("Q8_0", ["quant=a16"], 16),
        ("MXFP4", [], 16),
        ("MXFP4", ["quant=a8"], 16),
    ):
        path = tmp_path / f"{kind}.gguf"
        write_model_gguf(path, REFERENCE / "llama", kind)
        text = dry(f"model={path}", "predict_data=hi", *more)
        assert f"{kind} as the file has them, inputs of {bits} bits" in text, (kind, more)
    mixed = tmp_path / "mixed.gguf"
    write_model_gguf(mixed, REFERENCE / "llama", "MXFP4", mixed={"up_proj": "Q8_0"})
    assert "MXFP4, Q8_0 as the file has them, inputs of 8 bits" in dry(
        f"model={mixed}", "predict_data=hi"
    )


def test_workspace_grows_with_steps() -> None:
    short, long = need_of("max_length=256"), need_of("max_length=4096")
    assert long.cache == 16 * short.cache and long.work >= short.work
    assert need_of("max_length=256", "prefix_cache=disk").work == short.work + QUEUED


def test_the_cache_is_of_16_bits_unless_asked_otherwise() -> None:
    sizes = [need_of(*settings).cache for settings in ([], ["kv_cache=fp16"], ["kv_cache=fp32"])]
    assert sizes[0] == sizes[1] == sizes[2] // 2
    assert 3 * need_of("kv_cache=int8").cache < sizes[2]


def test_memory_of_packing_is_counted() -> None:
    assert need_of(HALF).total < need_of(HALF, "backend=ms").total
    # Rounded: the embedding as float32 and as float16, before anything else is there.
    assert need_of(HALF).weights + need_of(HALF).loading > 49152 * 576 * 6


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model with recurrent layers, in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REFERENCE / "qwen3_next", "hybrid")
    write_ascii_tokenizer(Path("hybrid"), 64)
    return ["model=auto", "load_checkpoint=hybrid"]


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (["backend=ms"], 2, "recurrent layers need backend=native"),
        (["backend=mslite"], 2, "recurrent layers need backend=native"),
        (["parallel=tp2"], 2, "has recurrent layers, which are not sharded"),
        (
            ["run_mode=finetune", "finetune.data=x.jsonl", "finetune_output=out"],
            2,
            "qwen3_next has recurrent layers, which cannot be trained",
        ),
    ],
)
def test_features_that_recurrent_layers_lack(
    settings: list[str],
    code: int,
    message: str,
    hybrid: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("x.jsonl").write_text('{"text": "12"}\n')
    prompts = [] if "run_mode=finetune" in settings else ["predict_data=12"]
    refused([*hybrid, *prompts, *settings], code)
    assert message in capsys.readouterr().err


def test_states_of_slots_are_counted(hybrid: list[str], dry: Dry) -> None:
    """Three layers of 3 * 80 inputs and 4 matrices of 8 by 32, with snapshots, one of them before
    drafts; keys of one."""
    states = 6 * 4 * 3 * (3 * 80 + 4 * 8 * 32)
    keys = 2 * 2 * 2 * 16 * 256
    assert f"cache {(states + keys) / 1e3:.1f} kB" in dry(*hybrid, "predict_data=12")


def test_levers_are_those_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = need_of().total, hints_of()
    assert list(found) == ["quant=a16w4", "quant=a16w8", "model.model_config.compute_dtype=float16"]
    assert all(total < now for total in found.values())
    assert found["quant=a16w8"] == need_of("quant=a16w8").total
    long = hints_of("max_length=8192", "quant=a16w4")
    assert list(long) == ["max_length=4096", "kv_cache=int8"]
    monkeypatch.setattr(resources, "WORTHWHILE", Fraction(found["quant=a16w8"], now))
    assert list(hints_of()) == ["quant=a16w4"]  # what is worth it saves more


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry: Dry
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 600 * 10**6)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    run = [*RANDOM, "predict_data=hi", "processor.tokenizer.type=ByteTokenizer"]
    text = dry(*run)
    assert "but 600.0 MB is free: NOT enough: the run would be refused" in text
    assert "to fit        quant=a16w4 would need" in text
    refused(run, 3)
    error = capsys.readouterr().err
    assert re.search(r"error: memory: the run needs \d+\.\d [MG]B \(weights 538\.1 MB", error)
    assert "-> quant=a16w4 would need" in error and "make random weights" not in error


def test_an_address_space_limit_is_reported_before_loading(tmp_path: Path) -> None:
    run = [sys.executable, str(ROOT / "run_lite.py"), "model=tiny_llama", "predict_data=hi"]
    limited = f'ulimit -v 900000; exec "$@" output_dir={tmp_path}'
    done = subprocess.run(["bash", "-c", limited, "-", *run], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "of address space" in done.stderr and "ulimit -v leaves" in done.stderr
    assert "make random weights" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [MemoryError("3 GiB"), RuntimeError("std::bad_alloc")])
def test_memory_that_fails_in_the_run_is_the_machines_fault(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lite_runner.output.completions.open_run", fail)
    refused(["model=tiny_llama", "predict_data=hi"], 3)
    stderr = capsys.readouterr().err
    assert f"error: not enough memory: {error}" in stderr and "Traceback" not in stderr


@pytest.mark.usefixtures("light_msrun")
def test_replicas_answer_as_one_process_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights: each of the two ranks packs its own."""
    settings = ["model=tiny_llama", "predict_data=[abc,xyz]", "max_new_tokens=4"]
    assert main(settings) == 0
    alone = capsys.readouterr().out
    assert main([*settings, "parallel=dp2"]) == 0
    assert capsys.readouterr().out == alone
