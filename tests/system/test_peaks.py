"""Peak memory of runs, in processes of their own, compared with its estimate."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from lite_runner.config.argv import parse
from lite_runner.run_modes import heads, resolve, run_mode
from tests.paths import FIXTURES

Cli = Callable[..., CompletedProcess[str]]

TOLERANCE = 0.15
# A file just written is in large folios of the page cache, more of which is mapped while it is
# read: 28 MiB of SmolLM2's, a tenth of the peak.
IN_FOLIOS = 0.25
RUNS = 3  # at most: how far packing is ahead of writing, and so the peak, differs between runs
TEXT = FIXTURES / "text/lighthouse.txt"
RANDOM = ["load_checkpoint=random", "max_new_tokens=4", "predict_data=hi"]
SIZES = "model.model_config."


def model(name: str, **sizes: int) -> list[str]:
    return [f"model={name}", *(f"{SIZES}{key}={value}" for key, value in sizes.items()), *RANDOM]


# 280 MB as float32, half of it in the embedding and the head; 270 MB, most of it in the embedding.
LLAMA = model(
    *("tiny_llama",),
    **{"hidden_size": 1024, "num_layers": 3, "intermediate_size": 2816, "vocab_size": 16000},
    **{"num_heads": 16, "n_kv_heads": 16, "head_dim": 64},
)
BLOOM = model("tiny_bloom", hidden_size=768, num_layers=3, vocab_size=60000, num_heads=12)
SMOLLM2 = ["model=smollm2_135m", "max_new_tokens=4", "predict_data=hi"]
HALF, BRAIN = (f"{SIZES}compute_dtype={kind}" for kind in ("float16", "bfloat16"))
STOCK = "backend=ms"

TABLE = {
    "llama": LLAMA,
    "llama float16": [*LLAMA, HALF],
    "llama a16w8": [*LLAMA, "quant=a16w8"],
    "llama a16w4": [*LLAMA, "quant=a16w4"],
    "bloom": BLOOM,
    "bloom bfloat16": [*BLOOM, BRAIN],
    "llama, MindSpore's operators": [*LLAMA, STOCK],
    "bloom, MindSpore's operators": [*BLOOM, STOCK],
    "llama, copies": [*LLAMA, "parallel=dp2"],
    "llama scored": [*LLAMA[:-2], "run_mode=eval", f"eval_data={TEXT}"],
}


def planned_mib(settings: Sequence[str]) -> float:
    config = resolve(parse([*settings, "dry_run=true"], heads()))[0]
    plan = run_mode(config.run_mode).plan(config)
    assert plan.memory is not None
    return plan.ranks.size * plan.memory.total / 2**20


@pytest.mark.parametrize("settings", TABLE.values(), ids=TABLE)
def test_a_peak_is_what_was_planned(settings: list[str], cli: Cli, tmp_path: Path) -> None:
    if "parallel" in str(settings):
        settings = [word for word in settings if "predict_data" not in word]
        settings += ["predict_data=[hi,ho]"]
    # Compiling is a part of the peak: no graph is kept from another run.
    assert_planned(settings, cli, tmp_path, {"LITE_RUNNER_CACHE": str(tmp_path / "cache")})


@pytest.mark.usefixtures("smollm2_gguf")
@pytest.mark.parametrize("quant", ["none", "a16w4"])
def test_a_peak_of_a_real_model(quant: str, cli: Cli, tmp_path: Path) -> None:
    # Fetching the file is no part of the peak: the cache is everybody's.
    settings = [*SMOLLM2, f"quant={quant}", "context.cache=false"]
    assert_planned(settings, cli, tmp_path, {}, IN_FOLIOS)


def assert_planned(
    settings: Sequence[str],
    cli: Cli,
    folder: Path,
    env: dict[str, str],
    tolerance: float = TOLERANCE,
) -> None:
    """The highest of a few peaks is what was planned: the plan is for the least lucky run."""
    planned = pytest.approx(planned_mib(settings), rel=tolerance)
    peaks: list[float] = []
    while not peaks or (max(peaks) != planned and len(peaks) < RUNS):
        peaks.append(peak_mib(settings, cli, folder / f"{len(peaks)}", env))
    assert max(peaks) == planned


def peak_mib(settings: Sequence[str], cli: Cli, folder: Path, env: dict[str, str]) -> float:
    done = cli(*settings, f"output_dir={folder}", env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "latest/result.json").read_text())
    return float(result["peak_rss_mib"])
