"""Two workers of the real MindFormers that share a model, as far as they come without a device:
they meet, build the network, and MindSpore's compiler refuses to shard it for a processor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lite_runner.backends.mindformers.process import (
    MindFormersProcess,
    WorkerGroup,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.releases import V1_0_2, V1_9_0, MindFormersRelease
from lite_runner.backends.mindformers.run import MindFormersRun, write_checkpoint
from lite_runner.config.argv import parse
from lite_runner.config.checks import PredictOptions
from lite_runner.errors import ArtifactError
from lite_runner.model import ModelFiles
from lite_runner.plan import Job
from lite_runner.plan.resources import run_options
from lite_runner.run_modes import heads, resolve
from tests.output.test_real_mindformers import random_tensors

# MindSpore 2.0.0 gives up a worker whose heartbeat a busy machine delays, before the two have met
# (then MindFormers' notice is what it says) or after; it has no setting for it.
APART = ("please set use_parallel=False", "The state of the cluster is error")
ATTEMPTS = 4

LINE = ("model=tiny_qwen2", "parallel=tp2", "backend=mindformers", "predict_data=hello")


def shared_yaml(folder: Path, release: MindFormersRelease) -> Path:
    """As two ranks get it, but with a processor for the device, and its checkpoint."""
    own = (f"mindformers.release={release.name}", "model.model_config.use_past=false")
    config, _ = resolve(parse([*LINE, *own], heads()))
    assert isinstance(config, PredictOptions)
    model = config.model_config()
    assert model is not None
    options = run_options(config.settings, Job.without_prompts(1, 16), "CPU", config.ranks)
    run = MindFormersRun.of(model, options)
    files = ModelFiles("random", None, model, 0)
    checkpoint = write_checkpoint(replace(files, held=random_tensors(model)), release, folder)
    path = folder / "mindformers.yaml"
    path.write_text(run.yaml(str(checkpoint)))
    return path


def load_together(
    folder: Path, yaml: Path, python: Path, release: MindFormersRelease
) -> list[BaseException | None]:
    """The errors of two workers that did not load."""
    group = WorkerGroup(2, free_port(), 300)
    with ExitStack() as resources:
        scheduler = start_scheduler(release.python, python, group)
        resources.callback(scheduler.close)

        def load(rank: int) -> None:
            process = MindFormersProcess(
                folder,
                release,
                threads=1,
                python=python,
                variables=group.variables(rank),
                scheduler=None if rank else scheduler,
            )
            resources.callback(process.close)
            process.load(yaml)

        with ThreadPoolExecutor() as pool:
            loads = [pool.submit(load, rank) for rank in range(2)]
            return [one.exception() for one in loads]


def test_1_0_2(mindformers_python: Path, tmp_path: Path) -> None:
    yaml = shared_yaml(tmp_path, V1_0_2)
    refusal = "Invalid communication backend: CPU for semi_auto_parallel"
    for _ in range(ATTEMPTS):
        errors = [str(error) for error in load_together(tmp_path, yaml, mindformers_python, V1_0_2)]
        met = any(refusal in error for error in errors)
        if met:
            break
    assert met, errors
    # The second to be refused may have lost the first by then.
    assert all(any(text in error for text in (refusal, *APART)) for error in errors), errors


def test_1_9_0(mindformers_1_9_python: Path, tmp_path: Path) -> None:
    yaml = shared_yaml(tmp_path, V1_9_0)
    for error in load_together(tmp_path, yaml, mindformers_1_9_python, V1_9_0):
        assert isinstance(error, ArtifactError)
        assert "Invalid backend: CPU" in error.message
