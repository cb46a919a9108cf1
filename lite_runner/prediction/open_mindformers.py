"""Starting the real MindFormers with the model of a run."""

from __future__ import annotations

from contextlib import ExitStack

from lite_runner import progress
from lite_runner.backends.mindformers.process import MindFormersProcess
from lite_runner.config.predict_options import PredictOptions
from lite_runner.output.report import RunFolder
from lite_runner.plan.job import Job
from lite_runner.plan.mindformers_checkpoint import write_checkpoint
from lite_runner.plan.mindformers_run import FILE_NAME, MindFormersRun
from lite_runner.plan.plan import Plan
from lite_runner.prediction.mindformers import MindFormersGenerator
from lite_runner.sizing.need import check_memory
from lite_runner.system.files import temporary_folder


def open_mindformers(plan: Plan, job: Job, folder: RunFolder) -> MindFormersGenerator:
    """MindFormers with the checkpoint of a plan; its yaml stays in `folder`. Raises RunnerError."""
    config = plan.config
    assert isinstance(config, PredictOptions) and plan.memory is not None
    check_memory(plan.memory)
    run = MindFormersRun.of(config, plan.model.model, job)
    with ExitStack() as resources:
        work = resources.enter_context(temporary_folder("mindformers", folder.path))
        with progress.step("write the checkpoint"):
            checkpoint = write_checkpoint(plan.model, run.release, work)
        yaml = folder.write_text(FILE_NAME, run.yaml(str(checkpoint)))
        with progress.step("load MindFormers"):
            process = MindFormersProcess(work, run.release, threads=config.context.threads)
            resources.callback(process.close)
            process.load(yaml)
        found = ", ".join(f"{name} {version}" for name, version in process.versions.items())
        progress.detail(f"the worker has {found}")
        if process.stand_ins:
            progress.note(
                f"MindFormers {run.release.name} with stand-ins for what has no kernel on a CPU:"
                f" {', '.join(process.stand_ins)}"
            )
        return MindFormersGenerator(process, run, work / "logits", resources.pop_all())
