"""The run that a model's name, yaml, folder or checkpoint means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.api.settings import as_mapping
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.groups import options_of
from lite_runner.config.model_dir import only_yaml
from lite_runner.config.options import GenerateOptions
from lite_runner.run_modes import resolve

_NO_PROMPT = "prompts are given to the model"  # a run's config must have one


def resolve_source(source: str | Mapping[str, Any], **keys: str | list[str]) -> GenerateOptions:
    """The config of a run of `source`, a model's name, yaml (or its content), folder or checkpoint;
    `keys` are set as on the command line.

    Raises ConfigError, and ArtifactError for a folder with several yaml files.
    """
    settings: dict[str, str | list[str]] = {
        "run_mode": "predict",
        "use_parallel": "false",
        **keys,
    }
    if isinstance(source, Mapping):
        return _resolved(settings, content=as_mapping(source))
    path = Path(source).expanduser()
    file = None
    if source in options_of("model"):
        settings["model"] = source
    elif path.suffix in (".yaml", ".yml"):
        file = source
    elif path.is_dir():
        settings.setdefault("load_checkpoint", source)
        if found := only_yaml(path):
            file = str(found)
        else:
            settings["model"] = "auto"
    elif path.is_file() or "://" in source:
        settings.setdefault("load_checkpoint", source)
        settings["model"] = "auto"
    else:
        settings["model"] = source  # refused by resolve, with the nearest names
    return _resolved(settings, file)


def _resolved(
    settings: Mapping[str, str | list[str]],
    file: str | None = None,
    content: Mapping[str, Any] | None = None,
) -> GenerateOptions:
    given = [Setting(key, value) for key, value in settings.items()]
    given.append(Setting("predict_data", [_NO_PROMPT]))
    config, notes = resolve(
        CommandLine(settings=given, config_files=[file] if file else [], config=content)
    )
    assert isinstance(config, GenerateOptions)
    for note in notes:
        progress.note(note.detail or note.text)
    return config
