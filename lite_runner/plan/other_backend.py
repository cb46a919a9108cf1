"""compare_backend=: a run once more with another backend, in a process of its own, so that its
memory and speed are its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config.options import CompareOptions, ExportedOptions
from lite_runner.errors import RunnerError
from lite_runner.plugins import register_plugins, registered
from lite_runner.system import own_process


def ask_other(program: str, config: CompareOptions, folder: Path, **more: str) -> dict[str, Any]:
    """What the module `program`, which serves `job` with `start`, answers for compare_backend=; its
    files are in `folder`, which is made. `more` goes into the job. Raises RunnerError where it
    fails."""
    folder.mkdir()
    job = {
        "config": other_config(config).to_dict(),
        "plugins": registered(),
        "folder": str(folder),
        **more,
    }
    with progress.step(f"compare with {config.compare_backend}"):
        answer = own_process.ask(program, job)
    if "error" in answer:
        raise RunnerError(f"compare_backend={config.compare_backend}: {answer['error']}")
    return answer


def start(job: Mapping[str, Any]) -> None:
    """Make this process ready for the job of another one. Raises RunnerError."""
    progress.configure(verbosity=0)
    register_plugins(job["plugins"])


def other_config(config: CompareOptions) -> CompareOptions:
    """The config of the other run: what an exported model was made from, where one is named."""
    other = config.compare_backend
    assert other is not None
    if other != "mslite" and isinstance(config, ExportedOptions):
        config = config.without_given_model()
    return replace(config, backend=other, compare_backend=None)
