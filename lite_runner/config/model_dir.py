"""The folder of an exported model: the model that it names, a yaml of sizes beside its graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from lite_runner.architectures import architecture_of
from lite_runner.architectures.spec import Decoder
from lite_runner.config import at
from lite_runner.config.argv import CommandLine, ConfigFile, Setting
from lite_runner.config.sections import MANIFEST, ExportSettings
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.system.files import read_json_object
from lite_runner.system.yaml_file import read_yaml

_DIR = "infer.model_dir"
_RUN_BY = ("", "predict", "slora", "eval", "serve", "chat", "bench", "doctor")  # run modes
_PATHS = ("infer.prefill_model_path", "infer.increment_model_path")


def yamls_in(folder: Path) -> list[Path]:
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
    """The settings of the model in its folder's yaml.

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


def with_export(line: CommandLine, file: ConfigFile, models: Collection[str]) -> CommandLine:
    """A line whose model is the folder of an export of ours as one with infer.model_dir, and with
    the backend that runs it unless one is named."""
    typed = [setting for setting in line.settings if setting.key == "model" and not setting.prefix]
    given = str(typed[-1].value) if typed else ""
    if given and given not in models and is_export(given):
        settings = [setting for setting in line.settings if setting not in typed]
        line = dataclasses.replace(line, settings=[*settings, Setting(_DIR, given)])
    folder = _given(_DIR, line, {})
    ran = _given("run_mode", line, file.raw) in _RUN_BY
    named = _given("backend", line, file.raw) or "backend" in file.choices
    if ran and not named and folder and is_export(folder):
        line = dataclasses.replace(line, settings=[*line.settings, Setting("backend", "mslite")])
    return line


def is_export(folder: str) -> bool:
    """True for the folder of an export of ours; never raises, whatever the text."""
    try:
        manifest = read_json_object(Path(folder).expanduser() / MANIFEST)
        return manifest.keys() >= {"schema", "layout", "graphs"}
    except (ArtifactError, OSError, ValueError, RuntimeError):  # too long, a NUL, no such user
        return False


def with_model(line: CommandLine, file: ConfigFile) -> tuple[CommandLine, ConfigFile]:
    """A command line and its `--config`, that name no model but an exported one, with its model.

    That is `auto` where our manifest has the sizes, else what the one yaml of the folder says.
    """
    raw = file.raw
    named = any(setting.key == "model" for setting in line.settings) or "model" in file.choices
    named = named or bool(at(raw, "trainer.model_name") or at(raw, "model.arch.type"))
    if named or _given("run_mode", line, raw) not in _RUN_BY:
        return line, file
    given, graph = _given(_DIR, line, raw), _given(_PATHS[0], line, raw)
    if not given and not graph:
        return line, file
    found = None
    try:
        folder = Path(given).expanduser() if given else Path(graph).expanduser().parent
        if (folder / MANIFEST).is_file():
            settings = [Setting("model", "auto"), *line.settings]
            return dataclasses.replace(line, settings=settings), file
        alone = not line.config_files and line.config is None
        if given and alone and folder.is_dir():
            found = only_yaml(folder)
    except (OSError, RuntimeError):
        pass  # the run itself reports what is wrong with the folder
    if found is None:
        return line, file
    beside = dataclasses.replace(line, config_files=[str(found)])
    return beside, ConfigFile(str(found), model_settings(found))


def _given(key: str, line: CommandLine, file: Mapping[str, Any]) -> str:
    """The text of a key, "" where there is none; the command line goes before the file."""
    typed = line.last(key)
    return str(at(file, key) or "") if typed is None else typed


HEAD = "# Written by an export of lite-runner: the sizes of the model beside it.\n"


def model_yaml(
    model: Decoder, settings: ExportSettings, seq_length: int, model_type: str, *, use_past: bool
) -> str:
    """The text of the yaml; it reads as `--config`.

    `seq_length`: positions that the exported graphs have; `model_type`: mindir or mindir_lite;
    `use_past`: whether they keep a cache.
    """
    theirs = architecture_of(model).mindformers
    assert theirs is not None, "registered families have no yaml"
    config = settings.model.model_config
    sizes: dict[str, Any] = {
        "type": theirs.config,
        "seq_length": model.seq_length,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_id),
        "pad_token_id": model.pad_token_id,
        "use_past": use_past,
        "is_sample_acceleration": config.is_sample_acceleration,
        "compute_dtype": config.compute_dtype,
        **theirs.settings(model),
    }
    plain = {
        "trainer": {"type": settings.trainer.type, "model_name": settings.trainer.model_name},
        "processor": {"tokenizer": {"type": settings.processor.tokenizer.type}},
        "model": {"arch": {"type": theirs.network}, "model_config": sizes},
        "infer": {"infer_seq_length": seq_length, "model_type": model_type},
    }
    return HEAD + yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


def is_ours(path: Path) -> bool:
    """True if an export wrote this yaml; any other is the user's own, which stays."""
    with path.open("rb") as file:
        return file.read(len(HEAD)) == HEAD.encode()
