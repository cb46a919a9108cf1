"""The run config of a model's name, yaml, folder or checkpoint, and settings merged over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner import progress
from lite_runner.config import Invalid, did_you_mean, hints_of, leaves, nearest, put_at, read
from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.groups import options_of
from lite_runner.config.mindformers import IGNORED, translate
from lite_runner.config.model_dir import only_yaml
from lite_runner.config.schema import GenerateOptions
from lite_runner.config.sections import Context
from lite_runner.errors import ConfigError
from lite_runner.run_modes import predict, resolve

WEIGHTS = "checkpoint_name_or_path"
# Keys of a run that say what to do, not what with.
RUN_KEYS = frozenset(
    """
    convert_format convert_output dry_run eval_data eval_stride eval_window export_output merge
    model only_save_strategy overwrite predict_data quantize_output run_mode shard_format
    shard_output stream system output_format trainer transform_process_num transform_rank verbosity
    """.split()
)
_SECTION = "model.model_config."
_COMBINED = ("type", "hidden_size", "seq_length", "theta")  # other settings depend on them


def resolve_source(source: str | Mapping[str, Any], **keys: str | list[str]) -> GenerateOptions:
    """The config of a run of `source`, a model's name, yaml (or its content), folder or checkpoint;
    `keys` are set as on the command line.

    Raises ConfigError, and ArtifactError for a folder with several yaml files.
    """
    settings: dict[str, str | list[str]] = {"run_mode": "predict", "use_parallel": "false", **keys}
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


def assign(raw: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Set `settings` in `raw`, a run's config as plain data; returns those that have another name
    there, or no effect on a run.

    Raises ConfigError, with nothing set, for one that is unknown or cannot have its value.
    """
    known = leaves(predict.Config, raw)
    found = translate(
        _in_sections(raw, settings),
        known.keys() - (IGNORED - raw.keys()),
        options_of("model"),
        defaults=raw["model"]["model_config"],
        use_parallel=False,
        sized=True,
    )
    errors = [Invalid((), _with_suggestion(raw, text)) for text in found.errors]
    values: dict[str, Any] = {}
    for key, given in found.assignments.items():
        value = read(given, known[key], key, errors)
        values[key] = given if dataclasses.is_dataclass(value) else value
    if errors:
        raise ConfigError.of([error.text.replace(_SECTION, "") for error in errors])
    others = {key.removeprefix(_SECTION) for key in found.ignored} | {"pet_config"}
    rest = {name: value for name, value in settings.items() if name in others}
    if "batch_size" in rest:
        read_batch_size(rest["batch_size"])
    for key, value in values.items():
        put_at(raw, key, value)
    # The model's own default must not forbid a shorter context.
    length = f"{_SECTION}seq_length"
    shortened = length in values and f"{_SECTION}max_decode_length" not in values
    own = raw["model"]["model_config"]
    if shortened and own["max_decode_length"]:
        own["max_decode_length"] = min(own["max_decode_length"], own["seq_length"])
    return rest


def top_level_keys(raw: Mapping[str, Any]) -> list[str]:
    """The keys of a run's config that are settings of its model, too."""
    own = raw["model"]["model_config"]
    apart = {*_sections(raw), *RUN_KEYS, *own}
    return [name for name in hints_of(predict.Config) if name in raw and name not in apart]


def as_mapping(value: Any) -> Any:
    """An object of MindFormers' for a section (a PetConfig) as the mapping that it stands for."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def read_batch_size(value: Any) -> int:
    """Raises ConfigError unless it is an integer above 0."""
    if type(value) is not int or value < 1:
        raise ConfigError(f"batch_size: got {value!r}, expected an integer >= 1")
    return value


def _in_sections(raw: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` in the sections of a run's yaml. Raises ConfigError for keys of a run."""
    own, context = raw["model"]["model_config"], hints_of(Context)
    top, sections = top_level_keys(raw), _sections(raw)
    section = {name: own[name] for name in _COMBINED if name in own}
    placed: dict[str, Any] = {"model": {"model_config": section}}
    for name, value in settings.items():
        if name in RUN_KEYS:
            raise ConfigError(f"{name}: a key of a run, not a setting of a model")
        if name in top or (name in sections and isinstance(value, Mapping)):
            placed[name] = value
        elif name in context and name not in own:
            placed.setdefault("context", {})[name] = value
        else:
            section[name] = as_mapping(value)
    return placed


def _with_suggestion(raw: Mapping[str, Any], error: str) -> str:
    """The error of an unknown key, with the nearest of all that are settings of a model."""
    name, missing, _ = error.removeprefix(_SECTION).partition(": no such key")
    if not missing:
        return error
    known = [*raw["model"]["model_config"], *top_level_keys(raw), *hints_of(Context)]
    return f"{name}: no such key{did_you_mean(nearest(name, known))}"


def _sections(raw: Mapping[str, Any]) -> list[str]:
    return [name for name, value in raw.items() if isinstance(value, Mapping)]


_NO_PROMPT = "prompts are given to the model"  # a run's config must have one
