"""Starts the real MindFormers with a checkpoint that it reads, as ranks that share a model too.

The ranks meet on the processor, to agree and to gather results; their workers meet once more on the
device, through a scheduler of their own, and MindFormers shards the model over them.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from lite_runner import progress
from lite_runner.architectures import parameters
from lite_runner.backends.mindformers.process import (
    START_SECONDS,
    MindFormersProcess,
    WorkerGroup,
    WorkerPlace,
    free_port,
    start_scheduler,
)
from lite_runner.backends.mindformers.releases import MindFormersRelease, python_for
from lite_runner.backends.mindformers.run import FILE_NAME, MindFormersRun, memory_of
from lite_runner.backends.seat import RunOptions
from lite_runner.config.sections import Release, hccl_timeouts
from lite_runner.model.files import ModelFiles
from lite_runner.records import dataclass
from lite_runner.sizing.memory import check_memory
from lite_runner.system.ascend_devices import seen_ids
from lite_runner.system.files import atomic_write, temporary_folder
from lite_runner.weights.formats.ckpt_file import open_ckpt, write_ckpt
from lite_runner.weights.formats.mindformers import to_mindformers
from lite_runner.weights.tensor import LazyTensor, cast
from lite_runner.weights.write import HEAD

_CACHE = ("key_past", "value_past")


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


def open_mindformers(files: ModelFiles, options: RunOptions, folder: Path) -> OpenMindFormers:
    """MindFormers with a checkpoint; its yaml stays in `folder`. Of ranks that share a model the
    first one writes both for all. Raises RunnerError."""
    config, ranks, device = options.config, options.ranks, options.device
    run = MindFormersRun.of(files.model, options)
    check_memory(memory_of(run, ranks.tensor))
    python = python_for(run.release, device)
    first = ranks.rank - ranks.tensor_index
    yaml = folder / (f"{first}-{FILE_NAME}" if first else FILE_NAME)
    with ExitStack() as resources:
        work, place = None, None
        if ranks.tensor_index == 0:
            work = resources.enter_context(temporary_folder("mindformers", folder))
            with progress.step("write the checkpoint"):
                checkpoint = write_checkpoint(files, run.release, work)
            with atomic_write(yaml) as file:
                file.write(run.yaml(str(checkpoint)).encode("utf-8", errors="backslashreplace"))
        if ranks.tensor > 1:
            work, place = join_group(options, run.release, python, work, resources)
        assert work is not None, "that of the first rank"
        with progress.step("load MindFormers"):
            process = MindFormersProcess(
                work,
                run.release,
                threads=config.context.threads,
                python=python,
                device=device,
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


def write_checkpoint(files: ModelFiles, release: MindFormersRelease, folder: Path) -> Path:
    """A checkpoint of the model with the names of the release: that of the run itself where it is
    one, else one that is written to `folder`. Raises RunnerError."""
    tensors = _named(files, release)
    if files.path is not None and files.path.suffix == ".ckpt" and files.path.is_file():
        stored = open_ckpt(files.path)
        # One that MindFormers saved has its cache in it, of another batch and length.
        as_it_is = files.adapter is None and not any(
            one.dtype == "BF16" or name.endswith(_CACHE) for name, one in stored.items()
        )
        if as_it_is and tensors.keys() <= stored.keys():
            return files.path.absolute()  # the worker works elsewhere
    wide = {
        name: cast(name, tensor, "F32") if tensor.dtype == "BF16" else tensor
        for name, tensor in tensors.items()
    }
    target = folder / "mindformers.ckpt"
    write_ckpt(target, wide)
    return target


def _named(files: ModelFiles, release: MindFormersRelease) -> dict[str, LazyTensor]:
    """Every tensor by the name that the release has for it. Raises ArtifactError."""
    model = files.model
    tensors = dict(files.whole())
    if Release.of(release.name).needs_head(model):
        tensors[HEAD] = tensors[parameters(model)[0].name]
    named = to_mindformers(tensors, model)
    return {release.tensor_name(model, name): tensor for name, tensor in named.items()}


def join_group(
    options: RunOptions,
    release: MindFormersRelease,
    python: Path,
    work: Path | None,
    resources: ExitStack,
) -> tuple[Path, WorkerPlace]:
    """The folder of the workers that share a model, and this rank's place among them; every rank
    calls it. `work` is the folder, given by the first rank when all is in it; it starts the
    scheduler, which `resources` ends. Raises EnvironmentFault."""
    from lite_runner.backends import collectives

    config, ranks = options.config, options.ranks
    timeout = config.parallel.rendezvous_timeout + int(START_SECONDS)  # MindFormers is imported
    scheduler = None
    mine: dict[str, int | str] = {}
    if work is not None:
        port = free_port()
        scheduler = start_scheduler(
            release.python, python, WorkerGroup(ranks.tensor, port, timeout)
        )
        resources.callback(scheduler.close)
        mine |= {"port": port, "work": str(work)}
    on_ascend = options.device == "Ascend"
    if on_ascend:
        mine["device"] = seen_ids()[config.context.device_id]
    told = [json.loads(text) for text in collectives.gather(json.dumps(mine).encode())]
    first = told[0]
    group = WorkerGroup(
        ranks.tensor,
        first["port"],
        timeout,
        devices=[one["device"] for one in told] if on_ascend else (),
        more=hccl_timeouts(config.parallel.hccl_timeout) if on_ascend else {},
    )
    return Path(first["work"]), WorkerPlace(group, ranks.tensor_index, scheduler)
