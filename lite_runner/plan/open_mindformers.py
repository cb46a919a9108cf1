"""Starting the real MindFormers with the model of a run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lite_runner import progress
from lite_runner.backends.mindformers.process import MindFormersProcess
from lite_runner.backends.mindformers.releases import python_for
from lite_runner.config.options import MindFormersOptions
from lite_runner.plan.job import Job
from lite_runner.plan.mindformers_checkpoint import write_checkpoint
from lite_runner.plan.mindformers_ranks import join_group
from lite_runner.plan.mindformers_run import FILE_NAME, MindFormersRun
from lite_runner.plan.plan import Plan
from lite_runner.records import dataclass
from lite_runner.sizing.need import check_memory
from lite_runner.system.files import atomic_write, temporary_folder


@dataclass(frozen=True)
class OpenMindFormers:
    """MindFormers with a network and its weights."""

    process: MindFormersProcess
    run: MindFormersRun
    work: Path  # a folder for its files
    resources: ExitStack

    @property
    def engine(self) -> str:
        """Name of the engine in result.json."""
        replaced = [f"{name} stand-in" for name in self.process.stand_ins]
        return ", ".join([f"mindformers-{self.run.release.name}", *replaced])

    def close(self) -> None:
        """End the process, and remove its files; idempotent."""
        self.resources.close()


def open_mindformers(plan: Plan, job: Job, folder: Path) -> OpenMindFormers:
    """MindFormers with the checkpoint of a plan; its yaml stays in `folder`. Of ranks that share a
    model the first one writes both for all. Raises RunnerError."""
    config, ranks = plan.config, plan.ranks
    assert isinstance(config, MindFormersOptions) and plan.memory is not None
    check_memory(plan.memory)
    run = MindFormersRun.of(config, plan.model.model, job, plan.device)
    python = python_for(run.release, plan.device)
    first = ranks.rank - ranks.tensor_index
    yaml = folder / (f"{first}-{FILE_NAME}" if first else FILE_NAME)
    with ExitStack() as resources:
        work, place = None, None
        if ranks.tensor_index == 0:
            work = resources.enter_context(temporary_folder("mindformers", folder))
            _write(plan, run, work, yaml)
        if ranks.tensor > 1:
            work, place = join_group(plan, run.release, python, work, resources)
        assert work is not None, "that of the first rank"
        with progress.step("load MindFormers"):
            process = MindFormersProcess(
                work,
                run.release,
                threads=config.context.threads,
                python=python,
                device=plan.device,
                place=place,
            )
            resources.callback(process.close)
            process.load(yaml)
        found = ", ".join(f"{name} {version}" for name, version in process.versions.items())
        progress.detail(f"the worker has {found}")
        if process.stand_ins:
            progress.note(
                f"MindFormers {run.release.name} with stand-ins for what has no kernel on a CPU:"
                f" {', '.join(process.stand_ins)}"
            )
        return OpenMindFormers(process, run, work, resources.pop_all())


def _write(plan: Plan, run: MindFormersRun, work: Path, yaml: Path) -> None:
    """The checkpoint, below `work` unless it is read as it is, and the yaml that names it."""
    with progress.step("write the checkpoint"):
        checkpoint = write_checkpoint(plan.model, run.release, work)
    with atomic_write(yaml) as file:
        file.write(run.yaml(str(checkpoint)).encode("utf-8", errors="backslashreplace"))
