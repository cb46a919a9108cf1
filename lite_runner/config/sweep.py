"""The jobs of -m: every combination of the values that settings sweep over."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

from lite_runner.config.argv import CommandLine
from lite_runner.config.choices import user_folders
from lite_runner.config.compose import resolve
from lite_runner.config.composed import Schemas
from lite_runner.config.config_file import read_config
from lite_runner.config.fields import Note, accepts, annotation_of, leaves
from lite_runner.config.grammar import swept_values
from lite_runner.config.groups import GROUPS, options_of
from lite_runner.config.prompts import STANDARD_INPUT
from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

MAX_JOBS = 1_000


def jobs_of(line: CommandLine, schemas: Schemas) -> list[tuple[str, RunConfig, list[Note]]]:
    """(what distinguishes it, config, notes) of each job, all checked before any runs.

    A text is never swept: a comma in a prompt is a comma. Raises ConfigError with the faults
    of every job.
    """
    folders = user_folders(line, read_config(line.config_files))
    axes = [_values(setting.key, setting.value, folders, schemas) for setting in line.settings]
    count = 1
    for axis in axes:
        count *= len(axis)
    if not 0 < count <= MAX_JOBS:
        raise ConfigError(f"-m: got {count} jobs, expected 1 to {MAX_JOBS}")
    jobs, faults = [], []
    for values in itertools.product(*axes):
        settings = [
            dataclasses.replace(setting, value=value)
            for setting, value in zip(line.settings, values, strict=True)
        ]
        swept = [str(s) for s, axis in zip(settings, axes, strict=True) if len(axis) > 1]
        label = " ".join(swept)
        try:
            job = dataclasses.replace(line, action="run", settings=settings)
            config, notes = resolve(job, schemas)
        except ConfigError as error:
            faults.append(f"{label}: {error.message}" if label else error.message)
        else:
            reads = getattr(config, "predict_data", None)
            if reads == STANDARD_INPUT and count > 1:
                faults.append("predict_data=-: standard input can be read by one job only")
            jobs.append((label, config, notes))
    if faults:
        raise ConfigError.of(list(dict.fromkeys(faults)))
    return jobs


def _values(
    key: str, value: str | list[str], folders: Sequence[Path], schemas: Schemas
) -> list[str | list[str]]:
    if isinstance(value, list):
        return [value]
    modes = schemas.run_modes_with(key)
    schema = schemas.config_of(modes[0]) if modes else RunConfig
    annotation = annotation_of(key, leaves(schema))
    if key not in GROUPS and (annotation is None or accepts(annotation, str)):
        return [value]
    try:
        return [*swept_values(value, options_of(key, folders) if key in GROUPS else [])]
    except ValueError as error:
        raise ConfigError(f"{key}={value}: {error}") from None
