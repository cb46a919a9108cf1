"""Small functions that scripts for MindFormers import."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from lite_runner import progress
from lite_runner.errors import ArtifactError, ConfigError


class _Notes(logging.Handler):
    """Shows lines as the rest of lite_runner does, which logs them as well."""

    def emit(self, record: logging.LogRecord) -> None:
        progress.note(self.format(record))


logger = logging.getLogger("lite_runner.mindformers")
logger.addHandler(_Notes())
logger.setLevel(logging.INFO)
logger.propagate = False


def str2bool(text: str) -> bool:
    """true/false, 1/0, yes/no, whatever the case; a type for argparse, whose error it raises."""
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "y"):
        return True
    if lowered in ("false", "0", "no", "n"):
        return False
    raise argparse.ArgumentTypeError(f"got {text!r}, expected True or False")


def get_real_rank() -> int:
    """The rank of this process: RANK_ID, 0 where it is not set. ConfigError where it is none."""
    text = os.environ.get("RANK_ID", "0")
    if not text.isdecimal():
        raise ConfigError(f"RANK_ID: got {text!r}, expected an integer >= 0")
    return int(text)


def get_last_checkpoint(folder: str | Path) -> str:
    """The path of the newest .ckpt or .safetensors file in a folder. ArtifactError: there is none.

    Of several of the same time, the last by name.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ArtifactError(f"{path}: no such folder", "give the folder with the checkpoints")
    found = [item for item in path.iterdir() if item.suffix in (".ckpt", ".safetensors")]
    if not found:
        raise ArtifactError(f"{path}: holds no checkpoint, expected a .ckpt or .safetensors file")
    return str(max(found, key=lambda item: (item.stat().st_mtime_ns, item.name)))
