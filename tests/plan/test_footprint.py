"""What a run is said to need, from its sizes; tests/test_peaks.py holds it to what runs took."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lite_runner.app import main
from lite_runner.config.argv import parse
from lite_runner.config.cluster import ranks_of
from lite_runner.config.options import GenerateOptions
from lite_runner.config.requests import read_requests
from lite_runner.model.files import ModelFiles
from lite_runner.model.locate import locate_cached
from lite_runner.plan.job import Job, estimate, share
from lite_runner.plan.memory import job_memory, memory_hints
from lite_runner.run_modes import heads, resolve
from lite_runner.sizing.need import Memory
from lite_runner.system import environment, memory
from lite_runner.weights.derive import cast
from lite_runner.weights.formats.safetensors_file import write_safetensors
from lite_runner.weights.random import random_checkpoint
from tests.paths import ROOT
from tests.refusals import refused

HALF = "model.model_config.compute_dtype=float16"
Dry = Callable[..., str]


def config_of(*settings: str) -> GenerateOptions:
    line = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=[x,y]", *settings]
    config = resolve(parse(line, heads()))[0]
    assert isinstance(config, GenerateOptions)
    return config


def estimated(config: GenerateOptions) -> tuple[ModelFiles, Job]:
    """The files and the job of a config, prompts counted by their bytes."""
    files = locate_cached(config)
    return files, estimate(config, files, read_requests(config))


def need_of(*settings: str, device: str = "CPU") -> Memory:
    config = config_of(*settings)
    files, job = estimated(config)
    ranks = ranks_of(config)
    return job_memory(config, files, share(config, job, ranks), device, ranks)


def test_logits_of_prompts_are_counted() -> None:
    row = 3 * 4 * 49152
    plain = need_of()
    assert need_of("logprobs=5") == plain
    scored = need_of("prompt_logprobs=0")
    assert scored.work - plain.work == (256 - 2) * row  # as many as a step gives, not two
    assert need_of("predict_data=[{prompt: x, prompt_logprobs: 0},y]") == scored


@pytest.fixture
def dry(capsys: pytest.CaptureFixture[str]) -> Dry:
    def run(*settings: str, code: int = 0) -> str:
        assert main([*settings, "dry_run=true"]) == code
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ([HALF], "269.1 MB as float16"),
        ([HALF, "context.kernels=false"], "538.1 MB as float32"),
        ([HALF, "model.model_config.use_past=false"], "538.1 MB as float32"),
        (
            [HALF, "use_parallel=true", "parallel_config.model_parallel=3"],
            "179.4 MB as float32 in each rank",
        ),
        ([HALF, "use_parallel=true", "parallel_config.data_parallel=2"], "269.1 MB as float16 in"),
        (["quant=a16w4"], "96.6 MB as integers (quant=a16w4 quant_group=32)"),
        (["quant=a16w4", "context.kernels=false"], "538.1 MB as float32"),
        (["quant=a16w8", "context.device_target=Ascend"], "as integers (quant=a16w8)"),
    ],
)
def test_weights_are_counted_as_they_are_held(settings: list[str], held: str, dry: Dry) -> None:
    base = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=[x,y]"]
    assert held in dry(*base, *settings)


def test_sixteen_bits_of_a_file_stay_with_our_own_operators(dry: Dry, tmp_path: Path) -> None:
    config = config_of("model=tiny_llama")
    model = config.model_config()
    assert model is not None
    tensors = {name: cast(name, one, "BF16") for name, one in random_checkpoint(model, 0).items()}
    write_safetensors(tmp_path / "half.safetensors", tensors, {})
    settings = ["model=tiny_llama", "predict_data=hi"]
    settings += [f"load_checkpoint={tmp_path / 'half.safetensors'}"]
    own, stock = dry(*settings), dry(*settings, "context.kernels=false")
    assert "as bfloat16" in own and "as float32" in stock


def test_what_steps_work_in_grows_with_them() -> None:
    short, long = need_of("max_length=256"), need_of("max_length=4096")
    assert long.cache == 16 * short.cache and long.work >= short.work
    stock = "context.kernels=false"
    assert need_of(stock, "max_length=4096").work > need_of(stock, "max_length=256").work
    rounded = need_of("max_length=4096", "kv_cache=int8").cache
    assert 3 * rounded < long.cache


def test_what_is_rounded_is_there_twice_for_a_while() -> None:
    assert need_of().loading < need_of(HALF).loading
    # The embedding as float32 and rounded, before anything else is there.
    assert need_of(HALF).weights + need_of(HALF).loading > 49152 * 576 * 6


def test_levers_are_those_that_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings_of(*settings: str) -> dict[str, int]:
        config = config_of(*settings)
        files, job = estimated(config)
        found = memory_hints(config, files, job, "CPU", ranks_of(config))
        return {hint.setting: hint.need.total for hint in found}

    now = need_of().total
    found = settings_of()
    assert list(found) == ["quant=a16w4", "quant=a16w8", "model.model_config.compute_dtype=float16"]
    assert all(total < now for total in found.values())
    assert found["quant=a16w8"] == need_of("quant=a16w8").total
    long = settings_of("max_length=8192", "quant=a16w4")
    assert list(long) == ["kv_cache=int8", "predict_batch_size=1", "max_length=4096"]
    assert not settings_of("context.kernels=false")  # MindSpore's have float32 alone
    assert "predict_batch_size=1" in settings_of("context.kernels=false", "max_length=8192")


def test_a_plan_for_a_device_that_is_not_here(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "ascend_devices", lambda: 0)
    ascend = ["context.device_target=Ascend", "model=llama2_7b", "predict_data=hi"]
    told = dry(*ascend)
    assert "13.5 GB as float16" in told
    assert "needs 13.7 GB on each device; what one has is not known" in told
    assert "3.4 GB as float16 in each rank" in dry(*ascend, "parallel=tp4")
    text = Path(__file__)
    scored = dry(*ascend[:2], "run_mode=eval", f"eval_data={text}")
    assert "needs 13.7 GB on each device" in scored
    export = dry(*ascend[:2], "run_mode=export")
    assert "static_pair" in export and "free" in export  # the graphs are written here
    assert main(ascend) == 3  # what is to be run wants one


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 600 * 10**6)
    monkeypatch.setattr(memory, "resident", lambda: 0)
    run = ["model=smollm2_135m", "load_checkpoint=random", "predict_data=hi"]
    run += ["processor.tokenizer.type=ByteTokenizer", f"output_dir={tmp_path}"]
    assert main([*run, "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert "but 600.0 MB is free: NOT enough: the run would be refused" in told
    assert "to fit        quant=a16w4 would need" in told
    refused(run, 3)
    error = capsys.readouterr().err
    assert "error: memory: the run needs 1.1 GB (weights 538.1 MB" in error
    assert "-> quant=a16w4 would need" in error and "make random weights" not in error


def test_a_limit_of_the_address_space_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    run = [sys.executable, str(ROOT / "run_lite.py"), "model=tiny_llama", "predict_data=hi"]
    limited = f'ulimit -v 1500000; exec "$@" output_dir={tmp_path}'
    done = subprocess.run(["bash", "-c", limited, "-", *run], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert "of address space" in done.stderr and "ulimit -v leaves 1." in done.stderr
    assert "make random weights" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("error", [MemoryError("3 GiB"), RuntimeError("std::bad_alloc")])
def test_memory_that_fails_in_the_run_is_the_machines_fault(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("lite_runner.prediction.opening.load", fail)
    refused(["model=tiny_llama", "predict_data=hi", f"output_dir={tmp_path}"], 3)
    told = capsys.readouterr().err
    assert f"error: memory: there is not enough: {error}" in told and "Traceback" not in told
