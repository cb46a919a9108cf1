"""Converting a checkpoint, with an adapter merged where one is given."""

from __future__ import annotations

from pathlib import Path

from lite_runner import progress
from lite_runner.config.convert_checks import ConvertOptions
from lite_runner.config.sections import CheckpointFormat
from lite_runner.errors import ArtifactError, ConfigError
from lite_runner.model.files import RANDOM, ModelFiles
from lite_runner.model.merged_adapter import with_adapter
from lite_runner.model.side_files import side_files
from lite_runner.weights.write import config_file, convert, files_folder


def check_has_weights(files: ModelFiles) -> None:
    """Raises ConfigError for random weights."""
    if files.source == RANDOM:
        raise ConfigError(
            "run_mode=convert reads a checkpoint, and load_checkpoint=random is none",
            "load_checkpoint=DIR",
        )


def convert_checkpoint(
    config: ConvertOptions, files: ModelFiles, target: Path, form: CheckpointFormat
) -> str:
    """Write the checkpoint; returns its source. Raises RunnerError."""
    assert files.path is not None
    whole = with_adapter(files, config)
    beside = _side_files(config, whole, form)
    convert(
        files.path,
        files.model,
        target,
        form,
        overwrite=config.overwrite,
        beside=beside,
        adapter=whole.adapter,
        release=config.release,
        report=progress.note,
    )
    if form != "huggingface":
        progress.note(f"wrote {files_folder(target)}: {', '.join(beside)}")
    return files.source


def _side_files(
    config: ConvertOptions, files: ModelFiles, form: CheckpointFormat
) -> dict[str, bytes]:
    """Config and tokenizer files to write with the weights.

    Raises ArtifactError for an unreadable tokenizer that was named, or that a folder in Hugging
    Face's format needs; other formats are written without one.
    """
    try:
        return side_files(config, files)
    except ArtifactError as error:
        if form == "huggingface" or config.tokenizer_source:
            raise
        progress.note(f"no tokenizer is written: {error.message}")
        return config_file(files.model)
