"""InferTask: MindFormers' way to a pipeline of an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lite_runner.api.exported import exported_config
from lite_runner.api.infer_config import InferConfig
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.text_generation_pipeline import TASKS, TextGenerationPipeline, check_task


class InferTask:
    """The tasks that exported models can do."""

    @classmethod
    def get_infer_task(
        cls, task_type: str, task_config: Mapping[str, Any], **kwargs: Any
    ) -> TextGenerationPipeline:
        """The pipeline of a task; `task_config` is an InferConfig, or has its fields; `kwargs` are
        those of TextGenerationPipeline (tokenizer, ...).

        Raises ConfigError for an unknown task, ArtifactError for a model that cannot be run.
        """
        check_task(task_type)
        config = exported_config(InferConfig(task_config))
        return TextGenerationPipeline(PreTrainedModel(config), **kwargs)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Whether there is such a task."""
        return task_type in TASKS

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks."""
        return list(TASKS)
