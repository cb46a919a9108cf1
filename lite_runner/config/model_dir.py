"""The folder of an exported model, as far as composing a config needs it: which model it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lite_runner.config.argv import CommandLine, Setting
from lite_runner.config.config_file import ConfigFile
from lite_runner.config.yaml_file import at, read_yaml
from lite_runner.errors import ArtifactError, ConfigError

MANIFEST = "manifest.json"  # of an export of ours
_DIR = "infer.model_dir"
_PATHS = ("infer.prefill_model_path", "infer.increment_model_path")


def yamls_in(folder: Path) -> list[Path]:
    """The yaml files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))


def only_yaml(folder: Path) -> Path | None:
    """The yaml file of a model's folder, None where there is none. ArtifactError for several."""
    found = yamls_in(folder)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ArtifactError(
            f"{folder}: got {len(found)} yaml files ({names}), expected one",
            "keep the model's own, or give its path",
        )
    return found[0] if found else None


def model_settings(path: Path) -> dict[str, Any]:
    """What the yaml in a model's folder says of the model.

    It is what the export was made with: that it exported, and to which paths, is left out.
    Raises ArtifactError where it is broken.
    """
    try:
        raw = read_yaml(path)
    except ConfigError as error:
        raise ArtifactError(error.message, "the yaml of an exported model has its sizes") from error
    raw.pop("run_mode", None)
    if isinstance(infer := raw.get("infer"), dict):
        paths = {key.removeprefix("infer.") for key in _PATHS}
        raw["infer"] = {key: value for key, value in infer.items() if key not in paths}
    return raw


def with_model(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """A command line and its `--config`, that name no model but an exported one, with its model.

    That is `auto` where our manifest has the sizes, else what the one yaml of the folder says.
    """
    raw = file.raw
    named = any(setting.key == "model" for setting in line.settings) or "model" in file.choices
    named = named or bool(at(raw, "trainer.model_name") or at(raw, "model.arch.type"))
    if named or _given("run_mode", line, raw) not in ("", "predict", "eval"):
        return line, file
    given, graph = _given(_DIR, line, raw), _given(_PATHS[0], line, raw)
    if not given and not graph:
        return line, file
    folder = Path(given).expanduser() if given else Path(graph).expanduser().parent
    found = None
    try:
        if (folder / MANIFEST).is_file():
            settings = [Setting("model", "auto"), *line.settings]
            return dataclasses.replace(line, settings=settings), file
        alone = not line.config_files and line.config is None
        if given and alone and folder.is_dir():
            found = only_yaml(folder)
    except OSError:
        pass  # the run itself tells what is wrong with the folder
    if found is None:
        return line, file
    beside = dataclasses.replace(line, config_files=[str(found)])
    return beside, ConfigFile(str(found), model_settings(found))


def _given(key: str, line: CommandLine, file: Mapping[str, Any]) -> str:
    """The text of a key, "" where there is none; the command line goes before the file."""
    for setting in reversed(line.settings):
        if setting.key == key and isinstance(setting.value, str):
            return setting.value
    return str(at(file, key) or "")
