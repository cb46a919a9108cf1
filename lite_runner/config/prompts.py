"""The prompts that predict_data stands for: a text, a list, a .txt file or standard input.

In a file a backslash and an n are a line break, as in run_mindformer: a line is a prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lite_runner.config.schema import RunConfig
from lite_runner.errors import ConfigError

MAX_PROMPT_BYTES = 64 << 20
STANDARD_INPUT = "-"


def prompt_file(predict_data: str | tuple[str, ...]) -> Path | None:
    """The file that is meant by a single text that ends in .txt; a list holds texts only."""
    if not isinstance(predict_data, str) or "\n" in predict_data or "\0" in predict_data:
        return None
    return Path(predict_data).expanduser() if predict_data.endswith(".txt") else None


def is_file(path: Path) -> bool:
    """Whether a file is there; no name that a user may give is an error."""
    try:
        return path.is_file()
    except OSError:  # a name too long to be a file's
        return False


def read_prompts(config: RunConfig) -> list[str]:
    """The prompts of a run, as typed; the lines of a file and standard input without their end.

    Standard input can be read once. Raises ConfigError for a file or an input that cannot be
    read, is not UTF-8, or holds no prompt.
    """
    data = config.predict_data
    path = prompt_file(data)
    if path is not None:
        text = decoded(_read_file(path), f"predict_data: {path}").removeprefix("\ufeff")
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        prompts = [line.replace("\\n", "\n") for line in lines if line.strip()]
        if not prompts:
            raise ConfigError(f"predict_data: {path} has no lines; expected a prompt a line")
        return prompts
    if data == STANDARD_INPUT:
        raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        text = decoded(raw, "predict_data: standard input").removesuffix("\n").removesuffix("\r")
        if not text:
            raise ConfigError("predict_data: standard input is empty; expected a prompt")
        return [text]
    if isinstance(data, str):
        return [data] if data else []
    return list(data)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"predict_data: {path}: {error.strerror}",
            f"a text that ends in .txt is a file of prompts; as a prompt: predict_data=['{path}']",
        ) from None


def decoded(raw: bytes, where: str) -> str:
    """UTF-8 as text; `where` begins what is said of other bytes, or of too many (ConfigError)."""
    if len(raw) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{where} has more than {MAX_PROMPT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}",
            "convert it: iconv -f GB18030 -t UTF-8",
        ) from None
