"""backend=mindformers: the real MindFormers, in a worker process with a Python of its own."""

from __future__ import annotations

from lite_runner.backends.seat import RunOptions
from lite_runner.model.files import ModelFiles
from lite_runner.sizing.memory import Memory


class MindFormers:
    """See `lite_runner.backends.seat.Seat`. It generates by itself and computes no rows of a
    scheduler: `lite_runner.backends.mindformers.start` opens it."""

    elastic = False

    def unsupported(self, files: ModelFiles, options: RunOptions) -> list[str]:
        """See Seat. What its release cannot compute, `memory` and `dtype` raise."""
        config = options.config
        if not config.runs_mindformers:
            return ["MindFormers completes prompts by itself and gives no logits to work with"]
        if not config.in_mindformers:
            return ["it is used where it is named"]
        return []

    def memory(self, files: ModelFiles, options: RunOptions) -> Memory:
        """See Seat: of this process and of MindFormers'. Raises ConfigError for what MindFormers
        cannot compute."""
        from lite_runner.backends.mindformers.run import memory_of, planned_run

        return memory_of(planned_run(files, options), options.ranks.tensor)

    def describe(self, files: ModelFiles, options: RunOptions) -> str:
        """See Seat."""
        return "the real MindFormers"

    def dtype(self, files: ModelFiles, options: RunOptions) -> str:
        """See Seat. Raises as `memory`."""
        from lite_runner.backends.mindformers.run import planned_run

        return planned_run(files, options).sizes.dtype


SEAT = MindFormers()
