"""backend=mindformers: the real MindFormers, in a worker process with a Python of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lite_runner.backends import RunOptions, Seat
from lite_runner.model import ModelFiles
from lite_runner.sizing import Memory

if TYPE_CHECKING:
    from lite_runner.backends.mindformers.run import MindFormersRun, OpenMindFormers


class MindFormersSeat(Seat):
    """See `lite_runner.backends.Seat`. What its release cannot compute, all but `unsupported` raise
    as ConfigError."""

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        if not options.settings.runs_mindformers:
            return ["MindFormers generates by itself and returns no logits"]
        if not options.settings.in_mindformers:
            return ["only with backend=mindformers"]
        return []

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """See Seat: of this process and of MindFormers'."""
        return _run(files, options).memory(options.ranks.tensor)

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        release = _run(files, options).release
        return f"MindFormers {release.name}'s, on mindspore {release.mindspore}"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        return _run(files, options).sizes.dtype

    def check(self, files: ModelFiles, options: RunOptions) -> None:
        """See Seat: its Python, and tokens that its attention does not see."""
        from lite_runner.backends.mindformers.releases import python_for

        run = _run(files, options)
        if not options.settings.dry_run:
            python_for(run.release, options.device)
            run.note_hidden(options.prompts)

    def details(self, files: ModelFiles, options: RunOptions) -> tuple[str, ...]:
        """See Seat: its yaml."""
        from lite_runner.backends.mindformers.run import FILE_NAME

        text = _run(files, options).yaml(options.settings.source.checkpoint)
        return f"{FILE_NAME}:", text.rstrip()

    def open(self, files: ModelFiles, options: RunOptions) -> OpenMindFormers:
        from lite_runner.backends.mindformers.run import open_mindformers

        return open_mindformers(files, options)


SEAT = MindFormersSeat()


def _run(files: ModelFiles, options: RunOptions) -> MindFormersRun:
    from lite_runner.backends.mindformers.run import planned_run

    return planned_run(files, options)
