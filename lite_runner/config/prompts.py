"""The prompts that predict_data stands for: a text, a list, a file or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lite_runner.config.fields import Fault, fault
from lite_runner.config.options import GenerateOptions
from lite_runner.config.prompt import Item, Items, Request, faults_of, is_utf8, requests_of
from lite_runner.config.prompt_files import READERS, Check
from lite_runner.config.sampling_checks import request_option_faults
from lite_runner.errors import ConfigError

MAX_PROMPT_BYTES = 64 << 20
STANDARD_INPUT = "-"


def prompt_file(predict_data: str | Items) -> Path | None:
    """The file that a single text names; a list holds texts only.

    A text that ends in .txt always means one, and the other kinds where it is one word, or a file
    that is there.
    """
    path = _path(predict_data)
    if path is None or path.suffix.lower() not in READERS:
        return None
    named = str(predict_data).endswith(".txt") or not any(map(str.isspace, str(predict_data)))
    return path if named or is_file(path) else None


def is_file(path: Path) -> bool:
    """Whether a file is there; no name that a user may give is an error."""
    try:
        return path.is_file()
    except OSError:  # a name too long to be a file's
        return False


def prompt_faults(config: GenerateOptions) -> Iterator[Fault]:
    """Validation errors of the prompts, as far as they show without reading a file."""
    for text in _data_faults(config):
        yield fault("predict_data", text)
    if config.system and not config.chat:
        yield fault(
            ("system", "chat"), "system= needs chat=true: it is the first message of a chat"
        )
    if not is_utf8(config.system):
        yield fault("system", "system: not valid UTF-8")


def _data_faults(config: GenerateOptions) -> Iterator[str]:
    data = config.predict_data
    if not data:
        if not config.dry_run and not config.only_save_strategy:
            example = "predict_data='The capital of France is'"
            yield f"predict_data is empty; give a prompt: {example}"
        return
    if isinstance(data, str):
        if not is_utf8(data):
            yield "predict_data: not valid UTF-8"
        if data != STANDARD_INPUT:
            yield from _file_faults(data)
        return
    try:
        requests = requests_of(data)
    except ValueError as error:
        yield f"predict_data: {error}"
        return
    check = _check(config)
    for i, request in enumerate(requests):
        where = f"predict_data[{i}]" if len(requests) == len(data) else "predict_data"
        for text in check(request):
            yield f"{where}: {text}"


def _file_faults(data: str) -> Iterator[str]:
    as_text = f"as a prompt: predict_data=['{data}']"
    path = prompt_file(data)
    if path is not None and not is_file(path):
        yield (
            f"predict_data: no file {path}; a text that ends in {path.suffix} names a file of"
            f" prompts ({as_text})"
        )
    elif path is None and (there := _path(data)) is not None and is_file(there):
        kinds = ", ".join(READERS)
        yield f"predict_data: {data} is a file, expected one of {kinds} ({as_text})"


def read_prompts(config: GenerateOptions) -> list[str | Request]:
    """The prompts of a run, as typed; the lines of a file and standard input without their end.

    Standard input can be read once. Raises ConfigError for a file or an input that cannot be
    read, is not UTF-8, or holds no prompt, and for what is wrong in it.
    """
    data = config.predict_data
    path = prompt_file(data)
    if path is not None:
        text = decoded(_read_file(path), f"predict_data: {path}").removeprefix("\ufeff")
        found = READERS[path.suffix.lower()](path, text, _check(config))
        if not found:
            raise ConfigError(f"predict_data: {path} has no lines; expected one prompt per line")
        return list(found)
    if data == STANDARD_INPUT:
        if sys.stdin.isatty() and config.verbosity > 0:
            print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
        raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        text = decoded(raw, "predict_data: standard input").removesuffix("\n").removesuffix("\r")
        if not text:
            raise ConfigError("predict_data: standard input is empty; expected a prompt")
        return [text]
    if isinstance(data, str):
        return [data] if data else []
    texts = [item for item in data if isinstance(item, str)]
    return [*texts] if len(texts) == len(data) else [*requests_of(data)]


def prompt_count(items: Sequence[Item]) -> int:
    """How many prompts a list is; as many as it has items where it is none."""
    try:
        return len(requests_of(items))
    except ValueError:
        return len(items)


def _check(config: GenerateOptions) -> Check:
    """Validation errors of a request of this run."""
    shared = config.generation()

    def faults(request: Request) -> list[str]:
        found = faults_of(request, chat=config.chat, adapters=bool(config.adapter_path))
        return found + request_option_faults(config, shared, request)

    return faults


def _path(predict_data: str | Items) -> Path | None:
    """The path that a single text would be."""
    if not isinstance(predict_data, str) or "\n" in predict_data or "\0" in predict_data:
        return None
    try:
        return Path(predict_data).expanduser()
    except RuntimeError:  # ~name of nobody
        return Path(predict_data)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"predict_data: {path}: {error.strerror}",
            f"a text that ends in {path.suffix} is a file of prompts; as a prompt:"
            f" predict_data=['{path}']",
        ) from None


def decoded(raw: bytes, where: str) -> str:
    """UTF-8 as text; other bytes, or too many, are a ConfigError that begins with `where`."""
    if len(raw) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{where} has more than {MAX_PROMPT_BYTES} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at {error.start}",
            "convert it: iconv -f GB18030 -t UTF-8",
        ) from None
