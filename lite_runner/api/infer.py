"""InferConfig and InferTask: exported models behind the same pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lite_runner.api.config import PretrainedConfig, settings_of
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.pipelines import TASKS, TextGenerationPipeline, check_task
from lite_runner.config.compose import options_of
from lite_runner.config.model_dir import MANIFEST, only_yaml
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.export.manifest import read_manifest
from lite_runner.given_model import graphs_in

_PATHS = ("prefill_model_path", "increment_model_path")
_CHOICES = {"model_type": ("mindir", "mindir_lite"), "target": ("auto", "Ascend", "CPU")}


@dataclass
class InferConfig:
    """Which exported model to run, and how. Raises ConfigError for values that cannot be."""

    prefill_model_path: str = ""
    increment_model_path: str = ""
    model_type: str = "mindir"  # or mindir_lite
    model_name: str = "common"  # a model of conf/model; common: as the export's manifest says
    infer_seq_length: int = 1024  # prompt and new tokens together
    target: str = "auto"  # Ascend, CPU, or auto: Ascend where there is one
    device_id: int = 0
    rank_id: int = 0
    ge_config_path: str = ""

    def __post_init__(self) -> None:
        faults = []
        for field in fields(self):
            value = getattr(self, field.name)
            choices = _CHOICES.get(field.name)
            if choices and value not in choices:
                faults.append(f"{field.name}: got {value!r}, expected one of {', '.join(choices)}")
            elif isinstance(field.default, str):
                if not isinstance(value, (str, Path)):
                    faults.append(f"{field.name}: got {value!r}, expected a text")
                setattr(self, field.name, str(value))
            elif type(value) is not int or value < (field.name == "infer_seq_length"):
                least = int(field.name == "infer_seq_length")
                faults.append(f"{field.name}: got {value!r}, expected an integer >= {least}")
        if faults:
            raise ConfigError.of(faults)


class InferTask:
    """The tasks that exported models can do."""

    @classmethod
    def get_infer_task(
        cls, task_type: str, task_config: InferConfig, **kwargs: Any
    ) -> TextGenerationPipeline:
        """The pipeline of a task; `kwargs` are those of TextGenerationPipeline (tokenizer, ...).

        Raises ConfigError for an unknown task, ArtifactError for a model that cannot be run.
        """
        check_task(task_type)
        return TextGenerationPipeline(PreTrainedModel(offline_config(task_config)), **kwargs)

    @classmethod
    def check_task_valid(cls, task_type: str) -> bool:
        """Whether there is such a task."""
        return task_type in TASKS

    @classmethod
    def support_list(cls) -> list[str]:
        """The names of all tasks."""
        return list(TASKS)


def infer_config(
    model: str | Path | tuple[str | Path, ...], kwargs: Mapping[str, Any]
) -> tuple[InferConfig, dict[str, Any]]:
    """The config that the arguments of `pipeline` mean, and those that are not about it.

    Raises ConfigError for more than two paths, ArtifactError for a folder that is ambiguous.
    """
    names = {field.name for field in fields(InferConfig)}
    given = {name: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    paths: dict[str, str] = {}
    if isinstance(model, tuple):
        if not 1 <= len(model) <= 2:
            raise ConfigError(
                f"model: got {len(model)} paths, expected one, or two: (prefill, increment)"
            )
        paths = dict(zip(_PATHS, map(str, model), strict=False))
    elif str(model) in options_of("model"):
        given.setdefault("model_name", str(model))
    else:
        paths = files_of(Path(model).expanduser())
    return InferConfig(**{**paths, **given}), rest


def files_of(folder: Path) -> dict[str, str]:
    """The paths of the graphs in a model's folder, by their names in InferConfig.

    Raises ArtifactError where there is no such folder, or no telling which files are meant.
    """
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder}: no such folder, and no model of that name",
            f"models: {', '.join(options_of('model'))}",
        )
    if (folder / MANIFEST).is_file():
        graphs = read_manifest(folder, check_files=False).paths(folder)
    else:
        only_yaml(folder)
        graphs = graphs_in(folder)
    return dict(zip(_PATHS, map(str, graphs.values()), strict=False))


def offline_config(config: InferConfig) -> PretrainedConfig:
    """The same as the config of a run with backend=mslite.

    Raises ConfigError where nothing says which model it is.
    """
    keys = {
        "backend": "mslite",
        "infer.ge_config_path": config.ge_config_path,
        "context.device_target": config.target,
        "context.device_id": str(config.device_id),
        **{f"infer.{name}": getattr(config, name) for name in _PATHS},
    }
    if config.rank_id:
        raise ConfigError(f"rank_id={config.rank_id}: several cards are not available yet")
    # Of graphs that are there, their length and type hold, not the defaults of InferConfig.
    if not config.prefill_model_path:
        keys["infer.infer_seq_length"] = str(config.infer_seq_length)
    if not config.prefill_model_path or config.model_type != InferConfig.model_type:
        keys["infer.model_type"] = config.model_type
    return PretrainedConfig(settings_of(_model_of(config), **keys))


def _model_of(config: InferConfig) -> str:
    """Its name; of `common`, what lies beside the graphs says: the manifest, else a yaml."""
    if config.model_name != "common":
        return config.model_name
    if config.prefill_model_path:
        folder = Path(config.prefill_model_path).expanduser().parent
        if (folder / MANIFEST).is_file():
            return "auto"
        if folder.is_dir() and (found := only_yaml(folder)):
            return str(found)
    raise ConfigError(
        "model_name: got common, and neither a manifest nor a yaml says which model it is",
        f"model_name= one of {', '.join(options_of('model'))}",
    )
