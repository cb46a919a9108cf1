"""Trainer: MindFormers' front for a task, as far as it goes without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lite_runner import launch
from lite_runner.api.config import PretrainedConfig, read_count
from lite_runner.api.model import AutoModel, PreTrainedModel
from lite_runner.api.pipelines import TextGenerationPipeline, check_task
from lite_runner.api.tokenizer import PreTrainedTokenizer
from lite_runner.errors import ConfigError


@dataclass(frozen=True)
class TrainingArguments:
    """Settings of a Trainer. Raises ConfigError for a batch_size that cannot be."""

    output_dir: str | Path = ""  # "": the config's
    batch_size: int | None = None  # rows of an exported graph; None: the model config's
    num_train_epochs: int = 1  # of training only: changes nothing

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            read_count(self.batch_size)


class Trainer:
    """A task and its model, to be exported or to predict with."""

    def __init__(
        self,
        args: TrainingArguments | None = None,
        task: str = "text_generation",
        model: PreTrainedModel | PretrainedConfig | str | Path | None = None,
        tokenizer: PreTrainedTokenizer | None = None,
    ) -> None:
        """`model`: an object, or what AutoModel takes; `tokenizer`: None takes the model's own.

        Raises ConfigError, ArtifactError.
        """
        check_task(task)
        if model is None:
            raise ConfigError("Trainer: no model given", "model='smollm2_135m', or a model object")
        if isinstance(model, PretrainedConfig):
            model = AutoModel.from_config(model)
        elif not isinstance(model, PreTrainedModel):
            model = AutoModel.from_pretrained(model)
        self.model = model
        self._args = args or TrainingArguments()
        self._tokenizer = tokenizer

    def export(self, *, overwrite: bool = False) -> Path:
        """What run_mode=export does; gives the folder with the graphs, output_dir/<model>_mindir.

        Raises ConfigError where it exists (without `overwrite`), and whatever exporting may.
        """
        settings = self.model.config.run_config()
        output = str(self._args.output_dir) or settings.output_dir
        folder = f"{output}/{settings.model_name}_mindir"
        launch.launch(
            self.model.config.run_config(
                {
                    "run_mode": "export",
                    "predict_data": "",
                    "predict_batch_size": self._args.batch_size or self.model.config.batch_size,
                    "output_dir": output,
                    "export_output": folder,
                    "overwrite": overwrite,
                }
            )
        )
        return Path(folder)

    def predict(
        self, *, input_data: str | Sequence[str], **options: Any
    ) -> list[dict[str, list[str]]]:
        """The completions of texts; see TextGenerationPipeline for the result and the options."""
        return TextGenerationPipeline(self.model, self._tokenizer)(input_data, **options)
