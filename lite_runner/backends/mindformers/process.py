"""The client of MindFormers' worker process, and of the group of workers that share a model.

MindSpore's releases do not talk with one another, so the group's scheduler runs in the workers'
Python.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lite_runner.backends.mindformers.releases import MindFormersRelease
from lite_runner.backends.workers.process import WorkerProcess
from lite_runner.backends.workers.python import WorkerPython, worker_command
from lite_runner.errors import ArtifactError, EnvironmentFault, RunnerError
from lite_runner.records import dataclass
from lite_runner.system.environment import VISIBLE

HOST = "127.0.0.1"  # they are on one machine
SCRIPT = Path(__file__).with_name("worker.py")
# Timeouts for a hang, not for a large model on a busy machine.
START_SECONDS = 300.0
LOAD_SECONDS = 3600.0
STEP_SECONDS = 3600.0  # until the next token; the first one waits for the compiler


@dataclass(frozen=True)
class Batch:
    """Prompts that are completed together, with the same options."""

    prompts: Sequence[Sequence[int]]  # token ids, as many rows as the network's batch
    limits: Sequence[int]  # most new tokens of each; 0: a row that only fills the batch
    eos: Sequence[int]
    pad: int  # a token that no prompt has: MindFormers takes it for the end of one
    options: Mapping[str, Any]  # of MindFormers' generate()
    logits: Path | None = None  # a file that takes float32 [rows, vocab] of each step


OnStep = Callable[[list[tuple[int, int]], float], None]  # [(row, token)], seconds


class MindFormersProcess:
    """A release of MindFormers with one network."""

    def __init__(
        self,
        folder: Path,
        release: MindFormersRelease,
        *,
        threads: int | None,
        python: Path | None = None,
        device: str = "CPU",
        variables: Mapping[str, str] = MappingProxyType({}),
        scheduler: WorkerProcess | None = None,
    ) -> None:
        """Start it; MindFormers leaves its log in `folder`. `python` None: that of the release;
        `variables`: those of its group (WorkerGroup); `scheduler`: the group's, if it is this
        process's.

        Raises EnvironmentFault if there is no MindFormers, or another one.
        """
        own = release.python
        found = own.find() if python is None else python
        self.stand_ins: Sequence[str] = ()  # operators that are not MindFormers' own
        self._process = WorkerProcess(
            own, worker_command(found, SCRIPT), variables=variables, needs=scheduler
        )
        try:
            self.versions = self._process.ask(
                {"op": "start", "folder": str(folder), "threads": threads, "device": device},
                seconds=START_SECONDS,
                doing="importing mindformers",
            )
        except RunnerError as error:
            self.close()
            raise EnvironmentFault(
                f"{found}: {error.message}", f"{own.remedy} sets up a Python that has it"
            ) from error
        except BaseException:
            self.close()
            raise
        if self.versions["mindformers"] != release.name:
            self.close()
            raise EnvironmentFault(
                f"{found} has mindformers {self.versions['mindformers']}, expected {release.name}",
                f"{own.remedy} sets up a Python that has it; unset {own.variable}",
            )

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    def load(self, yaml: Path) -> None:
        """Build the network that a yaml of run_mindformer describes, with its checkpoint. Raises
        ArtifactError for what MindFormers rejects."""
        answer = self._process.ask(
            {"op": "load", "yaml": str(yaml)},
            seconds=LOAD_SECONDS,
            doing=f"loading {yaml}",
            refused=ArtifactError,
        )
        self.stand_ins = answer["stand_ins"]

    def generate(self, batch: Batch, on_step: OnStep) -> list[int] | None:
        """Complete a batch; `on_step` is called with the new tokens of each step. Beam search has
        no steps: it returns the tokens of the best beam, an end token included."""
        request = {
            "op": "generate",
            "prompts": [list(map(int, prompt)) for prompt in batch.prompts],
            "limits": list(batch.limits),
            "eos": list(batch.eos),
            "pad": batch.pad,
            "options": dict(batch.options),
            "logits": None if batch.logits is None else str(batch.logits),
        }
        answer = self._process.ask(
            request,
            seconds=STEP_SECONDS,
            doing="generating",
            on_event=lambda event: on_step(
                [(row, token) for row, token in event["tokens"]], event["seconds"]
            ),
        )
        tokens: list[int] | None = answer.get("tokens")
        return tokens

    def score(self, ids: Sequence[int], pad: int) -> list[float]:
        """The log-likelihood of each of ids[1:] given those before it, by a network without a
        cache, which is as long as them or longer."""
        answer = self._process.ask(
            {"op": "score", "ids": list(ids), "pad": pad}, seconds=STEP_SECONDS, doing="scoring"
        )
        scores: list[float] = answer["log_likelihoods"]
        return scores

    def export(self, file: Path) -> None:
        """Write the network's graph as a MindIR, which takes token ids [batch, length]. Raises
        ArtifactError where MindSpore does not."""
        self._process.ask(
            {"op": "export", "file": str(file)},
            seconds=LOAD_SECONDS,
            doing=f"exporting {file.name}",
            refused=ArtifactError,
        )

    def close(self) -> None:
        """End the process; idempotent."""
        self._process.close()


@dataclass(frozen=True)
class WorkerGroup:
    """The workers that share a model, all on this machine."""

    size: int
    port: int  # of their scheduler
    timeout: int  # seconds until all have joined
    devices: Sequence[int] = ()  # of the workers, as ASCEND_RT_VISIBLE_DEVICES has them
    more: Mapping[str, str] = field(default_factory=dict)  # variables: HCCL's timeouts

    @property
    def scheduler_variables(self) -> dict[str, str]:
        return {
            "MS_ROLE": "MS_SCHED",
            "MS_WORKER_NUM": str(self.size),
            "MS_SCHED_HOST": HOST,
            "MS_SCHED_PORT": str(self.port),
            "MS_TOPO_TIMEOUT": str(self.timeout),
        }

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of a worker. In a dynamic cluster MindSpore takes the device of the local
        rank among those that are visible, whatever DEVICE_ID says."""
        place = str(rank)
        visible = {VISIBLE: ",".join(map(str, sorted(self.devices)))} if self.devices else {}
        return {
            **self.scheduler_variables,
            **self.more,
            **visible,
            "MS_ROLE": "MS_WORKER",
            "MS_NODE_ID": place,
            "RANK_ID": place,
            "RANK_SIZE": str(self.size),
            "DEVICE_ID": place,
        }


def free_port() -> int:
    """A port for a scheduler, which nothing uses now."""
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def start_scheduler(own: WorkerPython, python: Path, group: WorkerGroup) -> WorkerProcess:
    """The scheduler of a group, a process of `python`, that of the product `own`; it answers once
    all have joined, and schedules until it is closed. Raises EnvironmentFault."""
    named = replace(own, product=f"the scheduler of {own.product}'s workers")
    process = WorkerProcess(
        named, worker_command(python, SCRIPT), variables=group.scheduler_variables
    )
    process.begin({"op": "schedule"})
    return process
