"""InferConfig and InferTask: exported models behind the same pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lite_runner.api.config import PretrainedConfig, only_yaml, settings_of
from lite_runner.api.model import PreTrainedModel
from lite_runner.api.pipelines import TASKS, TextGenerationPipeline, check_task
from lite_runner.config.compose import options_of
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.export.manifest import MANIFEST, read_manifest

_PREFILL, _INCREMENT, _GE_CONFIG = "_prefill_graph.mindir", "_inc_graph.mindir", "config.ini"
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
        names_of_paths = ("prefill_model_path", "increment_model_path")
        paths = dict(zip(names_of_paths, map(str, model), strict=False))
    elif str(model) in options_of("model"):
        given.setdefault("model_name", str(model))
    else:
        paths = files_of(Path(model).expanduser())
    return InferConfig(**{**paths, **given}), rest


def files_of(folder: Path) -> dict[str, str]:
    """The paths in a model's folder, by their names in InferConfig. ArtifactError: see below."""
    if not folder.is_dir():
        raise ArtifactError(
            f"{folder}: no such folder, and no model of that name",
            f"models: {', '.join(options_of('model'))}",
        )
    if not (folder / MANIFEST).is_file() and only_yaml(folder) is None:
        raise ArtifactError(f"{folder}: neither a {MANIFEST} nor a yaml file of the model")
    graphs = sorted(folder.glob("*.mindir")) or sorted(folder.glob("*.ms"))
    found: dict[str, str] = {}
    for key, end in (("prefill_model_path", _PREFILL), ("increment_model_path", _INCREMENT)):
        named = [path for path in graphs if path.name.endswith(end)]
        if len(named) > 1:
            names = ", ".join(path.name for path in named)
            raise ArtifactError(f"{folder}: got {names}, expected one file ...{end}")
        if named:
            found[key] = str(named[0])
    if len(found) == 1:
        missing = _INCREMENT if "prefill_model_path" in found else _PREFILL
        raise ArtifactError(f"{folder}: only one of a pair: there is no file ...{missing}")
    if not found:
        if len(graphs) != 1:
            raise ArtifactError(
                f"{folder}: got {len(graphs)} MindIR files, expected one, or ...{_PREFILL} and "
                f"...{_INCREMENT}",
            )
        found["prefill_model_path"] = str(graphs[0])
    if (folder / _GE_CONFIG).is_file():
        found["ge_config_path"] = str(folder / _GE_CONFIG)
    return found


def offline_config(config: InferConfig) -> PretrainedConfig:
    """The same as the config of a run with backend=mslite."""
    keys = {
        "backend": "mslite",
        "infer.infer_seq_length": str(config.infer_seq_length),
        "infer.model_type": config.model_type,
        "infer.ge_config_path": config.ge_config_path,
        "context.device_target": config.target,
        "context.device_id": str(config.device_id),
    }
    if config.rank_id:
        raise ConfigError(f"rank_id={config.rank_id}: several cards are not available yet")
    name = config.model_name
    paths = [path for path in (config.prefill_model_path, config.increment_model_path) if path]
    folders = {Path(path).expanduser().parent for path in paths}
    for path in paths:
        if not Path(path).expanduser().is_file():
            raise ArtifactError(f"{path}: no such file")
    if len(folders) == 1 and (folder := folders.pop()).joinpath(MANIFEST).is_file():
        keys["infer.model_dir"] = str(folder)
        if name == "common":
            name = read_manifest(folder, check_files=False).model_name
    else:
        keys["infer.prefill_model_path"] = config.prefill_model_path
        keys["infer.increment_model_path"] = config.increment_model_path
    if name == "common":
        raise ConfigError(
            "model_name: got common, and no manifest says which model it is",
            f"model_name= one of {', '.join(options_of('model'))}",
        )
    return PretrainedConfig(settings_of(name, **keys))
